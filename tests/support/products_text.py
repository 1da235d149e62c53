"""The text of a small program with products, slices and loops, whose numbers are known."""

# A loop whose trips stand in its condition, as libtpu writes it; [8,16] × [16,4] eight times as a
# convolution with a dilated base.
PROGRAM = """HloModule jit_f, is_scheduled=true

%less (state: (s32[], f32[8,64,64])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[8,64,64]{2,1,0:T(8,128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  %limit = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

%products (p.0: bf16[8,8,16], p.1: bf16[8,16,4]) -> f32[8,8,4] {
  %p.0 = bf16[8,8,16]{2,1,0} parameter(0)
  %p.1 = bf16[8,16,4]{2,1,0} parameter(1)
  ROOT %conv = f32[8,8,4]{2,1,0} convolution(%p.0, %p.1), window={size=8 stride=7 lhs_dilate=8}, \
dim_labels=0bf_0io->0bf
}

%row (q.0: f32[8,64,64], q.1: s32[]) -> f32[1,64,64] {
  %q.0 = f32[8,64,64]{2,1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,64,64]{2,1,0} dynamic-slice(%q.0, %q.1, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %minus = f32[1,64,64]{2,1,0} negate(%cut)
}

%write (r.0: f32[8,64,64], r.1: f32[1,64,64], r.2: s32[]) -> f32[8,64,64] {
  %r.0 = f32[8,64,64]{2,1,0} parameter(0)
  %r.1 = f32[1,64,64]{2,1,0} parameter(1)
  %r.2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = f32[8,64,64]{2,1,0} dynamic-update-slice(%r.0, %r.1, %r.2, %zero.1, %zero.1)
}

%turn (t.0: f32[8,64,64]) -> f32[64,8,64] {
  %t.0 = f32[8,64,64]{2,1,0} parameter(0)
  ROOT %transpose.1 = f32[64,8,64]{2,1,0} transpose(%t.0), dimensions={1,0,2}
}

%body (state.1: (s32[], f32[8,64,64])) -> (s32[], f32[8,64,64]) {
  %state.1 = (s32[]{:T(128)}, f32[8,64,64]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %pool = f32[8,64,64]{2,1,0:T(8,128)} get-tuple-element(%state.1), index=1
  %part = f32[1,64,64]{2,1,0:T(8,128)} fusion(%pool, %i), kind=kLoop, calls=%row, backend_config={"window_config":{"estimated_cycles":"50"}}
  %new = f32[8,64,64]{2,1,0:T(8,128)} fusion(%pool, %part, %i), kind=kLoop, calls=%write
  %same = f32[8,64,64]{2,1,0:T(8,128)} copy(%new)
  %other = f32[8,64,64]{1,2,0:T(8,128)} copy(%same)
  %near = f32[8,64,64]{1,2,0:T(8,128)S(1)} copy(%other)
  %turned = f32[64,8,64]{2,1,0} fusion(%other), kind=kLoop, calls=%turn
  %one = s32[]{:T(128)} constant(1)
  %i.next = s32[]{:T(128)} add(%i, %one)
  ROOT %next = (s32[]{:T(128)}, f32[8,64,64]{2,1,0:T(8,128)}) tuple(%i.next, %new)
}

ENTRY %main (a: bf16[8,8,16], b: bf16[8,16,4], c: f32[8,64,64], n: s32[]) -> f32[8,8,4] {
  %a = bf16[8,8,16]{2,1,0} parameter(0)
  %b = bf16[8,16,4]{2,1,0:T(8,128)S(1)} parameter(1)
  %c = f32[8,64,64]{2,1,0} parameter(2)
  %n = s32[] parameter(3)
  %begin = s32[] constant(2)
  %begin.1 = s32[] copy(%begin)
  %start = (s32[], f32[8,64,64]{2,1,0}) tuple(%begin.1, %c)
  %loop = (s32[], f32[8,64,64]{2,1,0}) while(%start), condition=%less, body=%body
  %start.1 = (s32[], f32[8,64,64]{2,1,0}) tuple(%n, %c)
  %loop.1 = (s32[], f32[8,64,64]{2,1,0}) while(%start.1), condition=%less, body=%body
  %gemm = (bf16[8,4]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"]}}}
  %dot = f32[8,8,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
  ROOT %result = f32[8,8,4]{2,1,0} fusion(%a, %b), kind=kOutput, calls=%products
}
"""  # noqa: E501

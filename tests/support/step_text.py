"""The text of a small step's program whose numbers are known, as a TPU's compiler writes it, and
the config that it is of."""

from jaxtrain.pipeline.setup import make_setup
from support import small

# Two stages and four microbatches; a tick permutes beside one loop around its ops. Arrays
# [64,16,512] float32 are 2 MB.
END = {"pipeline.vocabulary": "end_stages"}
CONFIG = small.config(
    (1, 2, 1),
    "1f1b",
    1,
    4,
    {"data.sequence_length": 64, "pipeline.permute": "early", "pipeline.remat": "none", **END},
)
TICKS = make_setup(CONFIG).table.ticks
TICK = "jit(train)/shard_map/while/body/while"
STEP = f"""HloModule jit_train, is_scheduled=true

%wanted (c: (s32[], f32[64,16,512])) -> pred[] {{
  %c = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  ROOT %is = pred[] custom-call(%c), custom_call_target="unknown"
}}

%F (f: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %f = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  %f.i = s32[] get-tuple-element(%f), index=0
  %x = f32[64,16,512]{{2,1,0}} get-tuple-element(%f), index=1
  %w = f32[512,512]{{1,0}} constant({{...}})
  %y = f32[64,16,512]{{2,1,0}} dot(%x, %w), lhs_contracting_dims={{2}}, rhs_contracting_dims={{0}}, metadata={{op_name="{TICK}/body/while/body/K0/dot"}}, backend_config={{"estimated_cycles":"1000"}}
  %scores = bf16[1,4,64,64]{{3,2,1,0}} exponential(%y), metadata={{op_name="{TICK}/body/while/body/K0/scores"}}
  %q = bf16[1,8,64,16]{{3,2,1,0}} custom-call(%scores), custom_call_target="AllocateBuffer"
  %attended = bf16[1,8,64,16]{{3,2,1,0}} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", metadata={{op_name="{TICK}/body/while/body/K0/splash_mha_fwd/pallas_call"}}
  ROOT %f.next = (s32[], f32[64,16,512]{{2,1,0}}) tuple(%f.i, %y)
}}

%B (b: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %b = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  %b.i = s32[] get-tuple-element(%b), index=0
  %g = f32[64,16,512]{{2,1,0}} get-tuple-element(%b), index=1
  %turned = f32[64,16,512]{{1,2,0}} copy(%g), metadata={{op_name="{TICK}/body/while/body/B0/copy"}}, backend_config={{"estimated_cycles":"300"}}
  ROOT %b.next = (s32[], f32[64,16,512]{{2,1,0}}) tuple(%b.i, %g)
}}

%ops (o: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %o = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  %loop.F = (s32[], f32[64,16,512]{{2,1,0}}) while(%o), condition=%wanted, body=%F, metadata={{op_name="{TICK}/body/while"}}
  %loop.B = (s32[], f32[64,16,512]{{2,1,0}}) while(%loop.F), condition=%wanted, body=%B, metadata={{op_name="{TICK}/body/while"}}
  ROOT %o.next = (s32[], f32[64,16,512]{{2,1,0}}) tuple(%o)
}}

%tick (t: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %t = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  %m = f32[64,16,512]{{2,1,0}} get-tuple-element(%t), index=1
  %up = (f32[64,16,512]{{2,1,0}}, f32[64,16,512]{{2,1,0}}, u32[]) collective-permute-start(%m), source_target_pairs={{{{0,1}},{{1,0}}}}, metadata={{op_name="{TICK}/body/permute_EARLY/ppermute"}}
  %early = f32[64,16,512]{{2,1,0}} collective-permute-done(%up)
  %down = (f32[64,16,512]{{2,1,0}}, f32[64,16,512]{{2,1,0}}, u32[]) collective-permute-start(%m), source_target_pairs={{{{0,1}},{{1,0}}}}, metadata={{op_name="{TICK}/body/permute_EARLY/ppermute"}}
  %busy = (s32[], f32[64,16,512]{{2,1,0}}) while(%t), condition=%wanted, body=%ops, metadata={{op_name="{TICK}"}}
  %late = f32[64,16,512]{{2,1,0}} collective-permute-done(%down)
  %slots = f32[64,16,512]{{1,2,0}} copy(%late), backend_config={{"estimated_cycles":"200"}}
  ROOT %t.next = (s32[], f32[64,16,512]{{2,1,0}}) tuple(%t)
}}

ENTRY %main (a: (s32[], f32[64,16,512])) -> (s32[], f32[64,16,512]) {{
  %a = (s32[], f32[64,16,512]{{2,1,0}}) parameter(0)
  ROOT %scan = (s32[], f32[64,16,512]{{2,1,0}}) while(%a), condition=%less, body=%tick, backend_config={{"known_trip_count":{{"n":"{TICKS}"}}}}
}}
"""  # noqa: E501

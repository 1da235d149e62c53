"""The text of a windowed einsum, as libtpu writes it: a loop in which each device multiplies the
shard that it has while the next one arrives. XLA unrolls it by two; ROLLED is the same without."""

TRIPS = 8  # shards, each with one product
FLOPS = 2 * 64 * 512 * 512  # of a product
_PAIRS = ",".join(f"{{{n},{(n + 1) % 8}}}" for n in range(8))
_STEP = """
  %sending.N = (bf16[64,512]{1,0}, bf16[64,512]{1,0}, u32[], u32[]) collective-permute-start(%shard.N), channel_id=1, source_target_pairs=PAIRS
  %product.N = bf16[64,512]{1,0} convolution(%shard.N, %weight), dim_labels=bf_io->bf, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %shard.M = bf16[64,512]{1,0} collective-permute-done(%sending.N)
""".replace("PAIRS", "{" + _PAIRS + "}").strip("\n")  # noqa: E501


def _text(unrolled: int) -> str:
    """The program with so many steps in a trip."""
    steps = "\n".join(
        _STEP.replace(".N", f".{n}").replace(".M", f".{n + 1}") for n in range(unrolled)
    )
    return f"""HloModule jit_train_step, is_scheduled=true

%less (state: (u32[], bf16[64,512], bf16[512,512])) -> pred[] {{
  %state = (u32[]{{:T(128)}}, bf16[64,512]{{1,0}}, bf16[512,512]{{1,0}}) parameter(0)
  %count = u32[]{{:T(128)}} get-tuple-element(%state), index=0
  %limit = u32[]{{:T(128)}} constant({TRIPS})
  ROOT %lt = pred[]{{:T(512)}} compare(%count, %limit), direction=LT
}}

%body (state.1: (u32[], bf16[64,512], bf16[512,512])) -> (u32[], bf16[64,512], bf16[512,512]) {{
  %state.1 = (u32[]{{:T(128)}}, bf16[64,512]{{1,0}}, bf16[512,512]{{1,0}}) parameter(0)
  %i = u32[]{{:T(128)}} get-tuple-element(%state.1), index=0
  %shard.0 = bf16[64,512]{{1,0}} get-tuple-element(%state.1), index=1
  %weight = bf16[512,512]{{1,0}} get-tuple-element(%state.1), index=2
{steps}
  %unrolled = u32[]{{:T(128)}} constant({unrolled})
  %i.next = u32[]{{:T(128)}} add(%i, %unrolled)
  ROOT %next = (u32[]{{:T(128)}}, bf16[64,512]{{1,0}}, bf16[512,512]{{1,0}}) tuple(%i.next, %shard.{unrolled}, %weight)
}}

ENTRY %main (a: bf16[64,512], w: bf16[512,512]) -> (u32[], bf16[64,512], bf16[512,512]) {{
  %a = bf16[64,512]{{1,0}} parameter(0)
  %w = bf16[512,512]{{1,0}} parameter(1)
  %begin = u32[]{{:T(128)}} constant(0)
  %start = (u32[]{{:T(128)}}, bf16[64,512]{{1,0}}, bf16[512,512]{{1,0}}) tuple(%begin, %a, %w)
  ROOT %loop = (u32[]{{:T(128)}}, bf16[64,512]{{1,0}}, bf16[512,512]{{1,0}}) while(%start), condition=%less, body=%body
}}
"""  # noqa: E501


WINDOWED, ROLLED = _text(2), _text(1)

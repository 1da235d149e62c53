"""Kimi-K2, which is a DeepSeek-V3 by another name. transformers 5.23.0 does not know it."""

from jaxtrain.hf.families.deepseek_v3 import ALIASES, TABLE
from jaxtrain.hf.families.family import Family, decoder_rules

FAMILY = Family(
    model_type="kimi_k2",
    architecture="DeepseekV3ForCausalLM",
    models="Kimi-K2",
    table=TABLE,
    rules=decoder_rules,
    aliases=ALIASES,
)

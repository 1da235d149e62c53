"""Kimi-K2, which is a DeepSeek-V3 by another name. transformers 5.23.0 does not know it."""

import dataclasses

from jaxtrain.hf.families import deepseek_v3

FAMILY = dataclasses.replace(deepseek_v3.FAMILY, model_type="kimi_k2", models="Kimi-K2")

"""config.json ↔ ModelConfig: every field is honoured, known to be without effect, or refused by its
name."""

import json

import pytest
from support.hf_models import CONFIGS
from support.hf_published import PUBLISHED

from jaxtrain.config import Config, ModelConfig, replace
from jaxtrain.config.recipes import load_recipe, shipped_recipes
from jaxtrain.config.rules import checks
from jaxtrain.hf import source_files
from jaxtrain.hf.families import FAMILIES
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.model_config import FREE, differing, read_model, write_model


def model_of(values: dict) -> ModelConfig:
    return read_model(values, "config.json")[1]


def resolved(model: ModelConfig) -> ModelConfig:
    return Config(model=model).fill().model


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name):
    family, model, _ = read_model(CONFIGS[name], "config.json")
    assert checks.error_of(replace(Config(model=model), {"data.sequence_length": 64})) is None
    written = write_model(resolved(model), family, 64)
    assert json.loads(json.dumps(written)) == written
    assert list(differing(model_of(written), model)) == []
    # by what it says
    other = ("rope_interleave", "sliding_window", "partial_rotary_factor", "max_window_layers")
    other += ("decoder_sparse_step", "first_k_dense_replace", "sliding_window_pattern")
    for field, value in CONFIGS[name].items():
        if field in written and isinstance(value, bool | int | float) and field not in other:
            assert written[field] == value, field


def test_every_family_is_tested():
    assert {values["model_type"] for values in CONFIGS.values()} == set(FAMILIES)


def test_a_llama():
    assert resolved(model_of(CONFIGS["llama"])) == resolved(
        ModelConfig(
            layers=3,
            width=16,
            heads=4,
            kv_heads=2,
            mlp_width=24,
            vocab_size=260,
            rotary_base=20000.0,
        )
    )


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 20000, "rope_scaling": None, "torch_dtype": "bfloat16"},
        {"rope_theta": 20000.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 20000.0, "rope_parameters": {"rope_theta": 20000.0}, "dtype": "float32"},
    ],
    ids=str,
)
def test_older_forms(form):
    older = {k: v for k, v in CONFIGS["llama"].items() if k != "rope_parameters"} | form
    assert model_of(older) == model_of(CONFIGS["llama"])


def test_missing_fields_have_the_defaults_of_transformers():
    model = resolved(model_of({"model_type": "llama"}))
    sizes = (model.layers, model.width, model.heads, model.kv_heads, model.mlp_width)
    assert sizes == (32, 4096, 32, 32, 11008)
    assert (model.norm_epsilon, model.rotary_base, model.vocab_size) == (1e-6, 10000.0, 32000)
    assert model_of({"model_type": "mixtral"}).rotary_base == 1e6


def test_rotary_scaling():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    newer = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 20000.0} | scaling}
    older = {"rope_theta": 20000.0, "rope_scaling": {"rope_type": "llama3"} | scaling}
    model = model_of(CONFIGS["llama"] | newer)
    assert (model.rope_scaling, model.rope_factor, model.rope_original_length) == ("llama3", 8, 32)
    plain = {name: v for name, v in CONFIGS["llama"].items() if name != "rope_parameters"}
    assert model_of(plain | older) == model
    written = write_model(resolved(model), FAMILIES["llama"], 64)
    assert written["rope_parameters"] == newer["rope_parameters"]
    assert written["rope_scaling"] == older["rope_scaling"]
    linear = model_of(plain | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert (linear.rope_scaling, linear.rope_factor) == ("linear", 2)
    assert isinstance(linear.rope_factor, float)


SCALED = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 20000.0}
REFUSED = [
    ("llama", {"model_type": "mamba"}, "model_type='mamba'"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
    ("llama", {"rope_parameters": SCALED}, "rope_parameters.low_freq_factor is missing"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type='dynamic'"),
    ("llama", {"rope_parameters": YARN | {"rope_type": "longrope"}}, "rope_type='longrope'"),
    ("llama", {"rope_parameters": YARN | {"type": "linear"}}, "rope_parameters.type='linear'"),
    ("llama", {"rope_parameters": YARN | {"factor": None}}, "rope_parameters.factor=None"),
    ("llama", {"rope_parameters": YARN | {"attention_factor": 0}}, "attention_factor=0 is"),
    ("llama", {"rope_parameters": YARN | {"truncate": None}}, "rope_parameters.truncate=None"),
    ("llama", {"rope_parameters": {"type": "yarn"}}, "rope_parameters.factor is missing"),
    ("llama", {"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention="),
    ("llama", {"rope_parameters": 5}, "rope_parameters=5 is no object"),
    ("llama", {"rope_scaling": YARN}, "rope_parameters={'rope_type': 'default', 'rope_theta': 20"),
    (
        "qwen2",
        {"rope_scaling": SCALED | {"rope_theta": 1e6, "low_freq_factor": 4, "high_freq_factor": 2}},
        "'high_freq_factor': 2} gives model.rope_high_freq_factor=2.0, which is not above",
    ),
    ("llama", {"original_max_position_embeddings": 8}, "original_max_position_embeddings=8"),
    ("llama", {"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor=2.0 is no field"),
    ("llama", {"rope_theta": 5e5}, "rope_theta=500000.0 contradicts rope_parameters"),
    ("llama", {"rope_theta": "much", "rope_parameters": None}, "rope_theta='much' is"),
    (
        "llama",
        {
            "rope_parameters": SCALED
            | {"low_freq_factor": 1, "high_freq_factor": 4}
            | {"original_max_position_embeddings": 8192.5}
        },
        "rope_parameters.original_max_position_embeddings=8192.5 is no integer",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor=0.5 is not"),
    (
        "llama",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary",
    ),
    (
        "llama",
        {"_layers": 4, "unsloth": 1},
        "config.json: unsloth=1 is no field that jaxtrain knows",
    ),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"attention_bias": 1}, "attention_bias=1"),
    ("llama", {"hidden_size": "16"}, "hidden_size='16'"),
    ("llama", {"hidden_size": 16.5}, "hidden_size=16.5"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
    ("llama", {"num_attention_heads": -4}, "num_attention_heads=-4"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps=None"),
    ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings=None"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.quant_method=None"),
    ("llama", {"auto_map": {"AutoModel": "x.y"}}, "auto_map="),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
    ("mistral", {"sliding_window": 0}, "sliding_window=0 is below 1"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types="),
    ("llama", {"sliding_window": 32}, "sliding_window=32 is not supported: attention is full"),
    ("mistral", {"attention_bias": False}, "attention_bias=False is no field"),
    ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1 is below 0"),
    ("deepseek_v3", {"num_nextn_predict_layers": 128}, "num_nextn_predict_layers=128 gives model."),
    ("deepseek_v3", {"num_nextn_predict_layers": 1.0}, "num_nextn_predict_layers=1.0 is no"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 is below 0"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ("deepseek_v3", {"head_dim": 8}, "head_dim=8"),
    ("deepseek_v3", {"index_topk": 2048}, "index_topk=2048"),
    ("deepseek_v3", {"n_group": None}, "n_group=None"),
    ("deepseek_v3", {"rope_interleave": None}, "rope_interleave=None"),
    ("deepseek_v3", {"n_group": 3}, "n_group=3 gives model.router_groups=3, which does not divide"),
    ("deepseek_v3", {"num_mtp_layers": 2}, "num_mtp_layers=2 contradicts"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("deepseek_v2", {"mlp_bias": None}, "mlp_bias=None"),
    ("deepseek_v2 with groups", {"n_group": None}, "n_group=None"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window=1"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window=False gives no win"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types=['chunked_attention',"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers=-1"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    ("qwen2", {"attention_bias": True}, "attention_bias=True is no field"),
    ("qwen3", {"head_dim": None}, "head_dim=None"),
    ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types="),
    ("qwen3", {"num_attention_heads": 3}, "num_key_value_heads=2 gives model.kv_heads=2"),
    ("qwen3", {"head_dim": 5}, "head_dim=5 gives model.head_dim=5, which makes heads of 5"),
    ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers=['1']"),
    ("qwen3_moe", {"mlp_only_layers": 2}, "mlp_only_layers=2"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen3_moe", {"num_key_value_heads": None}, "num_key_value_heads=None"),
    ("qwen3_moe", {"num_local_experts": 5}, "num_local_experts=5 contradicts num_experts=6"),
    ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 gives"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers=[1, 1] has less than the 4"),
    ("smollm3", {"no_rope_layers": [1, 1, "0", 1]}, "no_rope_layers="),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    ("seed_oss", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
    ("glm4_moe", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 rotates 3"),
    ("glm4_moe", {"partial_rotary_factor": None}, "partial_rotary_factor=None"),
    (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8},
        "sliding_window=8 is not supported beside no_rope_layers",
    ),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ("gemma2", {"sliding_window": None}, "sliding_window=None gives no window"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma2", {"num_attention_heads": 5}, "num_attention_heads=5 does not divide"),
    ("gemma3_text", {"model_type": "gemma3"}, "model_type='gemma3' is not supported"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq=0 is no finite number"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta=1000000"),
    ("gemma3_text", {"rope_parameters": [1]}, "rope_parameters=[1] is no object"),
    (
        "gemma3_text with types of layers",
        {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
        "rope_parameters.sliding_attention.rope_type='dynamic'",
    ),
    ("olmo3", {"layer_types": ["full_attention"]}, "layer_types=['full_attention'] has no type"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("gpt_oss", {"experts_per_token": 3}, "experts_per_token=3 contradicts num_experts_per_tok=2"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling.type='longrope' has a factor"),
    (
        "phi3",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling={'type': 'linear', 'factor': 2.0} is not supported: transformers",
    ),
    ("phi3", {"attention_bias": True}, "attention_bias=True"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 is below 1"),
    ("glm4_moe", {"auto_map": {"AutoModel": "modeling_glm.Glm"}}, "auto_map="),
    ("kimi_k2", {"auto_map": {"AutoModel": "modeling_kimi.KimiModel"}}, "auto_map="),
    ("gpt2", {"hidden_size": 32}, "hidden_size=32 contradicts n_embd=16"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu'"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED, ids=lambda value: str(value)[:60])
def test_refused_by_name(name, changes, message):
    with pytest.raises(HfError, match="^config.json: ") as error:
        model_of(CONFIGS[name] | changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, missing, heads, message",
    [
        ("llama", "hidden_size", 3, "num_attention_heads=3 does not divide hidden_size=4096"),
        ("qwen3", "num_attention_heads", 3, "num_key_value_heads=3 gives model.kv_heads=3, which"),
        ("gemma2", "hidden_size", 5, "num_attention_heads=5 does not divide hidden_size=2304"),
    ],
)
def test_a_default_that_is_at_fault_is_named(name, missing, heads, message):
    values = CONFIGS[name] | {"num_attention_heads": heads, "num_key_value_heads": heads}
    family = {"llama": 4096, "gemma2": 2304}
    default = {"hidden_size": family.get(name), "num_attention_heads": 32}[missing]
    with pytest.raises(HfError) as error:
        model_of({field: value for field, value in values.items() if field != missing})
    assert message in str(error.value)
    assert str(error.value).endswith(f"({missing} is missing, and {default} is its default)")


def test_marks_of_libraries_are_passed_over_with_a_line():
    marks = {"_attn_implementation_autoset": True, "unsloth_version": "2026.5", "_x": [1]}
    rope = CONFIGS["llama"]["rope_parameters"] | {"_y": 1}
    values = CONFIGS["llama"] | marks | {"rope_parameters": rope}
    _, model, notes = read_model(values, "config.json")
    assert model == model_of(CONFIGS["llama"])
    assert notes == [
        "passed over, as marks of libraries: rope_parameters._y",
        "passed over, as marks of libraries: _attn_implementation_autoset, unsloth_version, _x",
    ]


def test_what_changes_only_training_elsewhere_is_noted():
    _, _, notes = read_model(CONFIGS["gpt2"], "config.json")
    assert notes == ["attn_pdrop=0.1 is left out: it changes only how transformers trains"]


@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V3", "Kimi-K2"])
def test_remote_code_of_a_known_family_is_noted_and_not_published(name, tmp_path):
    values, _ = PUBLISHED[name]
    _, _, notes = read_model(values, "config.json")
    assert any(note.startswith("auto_map is left out: jaxtrain's own Deepseek") for note in notes)
    quantised = any(note.startswith("quantization_config is left out") for note in notes)
    assert quantised == ("quantization_config" in values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    source_files.keep(source_files.small_files(tmp_path), values, {}, tmp_path / "run")
    published = json.loads((tmp_path / "run" / source_files.SOURCE / "config.json").read_text())
    assert {*values} - {*published} == {"auto_map", "quantization_config"} & {*values}


def test_a_window_that_no_sequence_reaches_is_noted_where_the_family_has_none():
    _, _, notes = read_model(CONFIGS["llama"] | {"sliding_window": 64}, "config.json")
    assert notes and notes[0].startswith("sliding_window=64 is left out: no sequence of")


def test_default_key_heads_of_latent_attention():
    """transformers writes 128 where a config was made without them."""
    values = CONFIGS["deepseek_v3"] | {"num_key_value_heads": 128}
    assert model_of(values) == model_of(CONFIGS["deepseek_v3"])


# --- out ------------------------------------------------------------------------------------------


def test_models_of_recipes():
    """The family of each recipe's model."""
    families = {
        "tiny": "llama",
        "llama3_8b": "llama",
        "gpt2_124m": "gpt2",
        "mixtral_8x7b": "mixtral",
        "deepseek_v3": "deepseek_v3",
    }
    for name, expected in families.items():
        config = load_recipe(shipped_recipes()[name]).fill()
        answer = write_model(config.model, None, config.data.sequence_length)["model_type"]
        assert answer == expected, name


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sinks": True}, "model.sinks=True has no counterpart in a config.json of llama"),
        ({"activation": "gelu"}, "model.activation='gelu' has no counterpart in a config.json of"),
        ({"experts": 4}, "model.router_bias=True has no counterpart in a config.json of mixtral"),
        (
            {"sinks": True, "activation": "gelu"},
            "model.sinks=True, model.activation='gelu' have no counterpart in a config.json of",
        ),
    ],
    ids=str,
)
def test_a_model_that_no_family_can_hold(change, message):
    """The message names the settings in which the closest family differs."""
    changes = {f"model.{name}": value for name, value in change.items()}
    model = replace(Config(), changes).fill().model
    with pytest.raises(HfError) as error:
        write_model(model, None, 128)
    assert message in str(error.value)


def test_settings_that_are_free():
    model = ModelConfig()
    assert {*vars(model)} >= FREE
    assert list(differing(model, replace(Config(), {"model.loss_chunk": 7}).model)) == []
    differences = list(differing(model, replace(Config(), {"model.width": 64}).model))
    assert {"width", "head_dim", "mlp_width"} <= {*differences} and "layers" not in differences

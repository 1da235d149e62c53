"""The settings of a model, and the values that its dependent defaults stand for. No jax."""

import dataclasses

from jaxtrain.config.groups.setting import Choices, Range, as_entries, as_type, setting

# parts of a model that may have biases
BIASED = ("qkv", "out", "mlp", "router", "norm", "experts")
# settings whose items are NAME=VALUE
ENTRIES = ("kinds", "block_settings")
# far more than any model has, but few enough to set up each of them in time and memory
MOST_LAYERS = 2**16


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The transformer. These settings alone describe a model; none is known by name."""

    layers: int = setting(4, "transformer layers", Range(at_least=1, at_most=MOST_LAYERS))
    width: int = setting(128, "size of the residual stream", Range(at_least=1))
    pattern: tuple[str, ...] = setting(
        (),
        "kinds of the layers, repeated from the first layer on, model.dense_layers counted first: "
        "window; full, without the window; nope, full without positions; dense, without experts; "
        "or names of model.kinds; empty: all layers are of one kind",
    )
    kinds: tuple[str, ...] = setting(
        (),
        "settings of layers of one kind, each as KIND.SETTING=VALUE, or as a flag of its own: "
        "model.kinds.window.rotary_base=10000; a kind of another name than those of "
        "model.pattern has the model's settings but for these",
    )
    window: int = setting(
        0,
        "tokens that a token attends to, the last ones with itself, in layers with a window; 0: "
        "all before it",
        Range(at_least=0),
    )
    block: str = setting(
        "", "a layer of one's own, FILE.py:CLASS or MODULE:CLASS (docs/own_layer.md); empty: none"
    )
    mixer: str = setting(
        "",
        "a module of one's own in the place of attention, in the form of model.block; empty: none",
    )
    block_settings: tuple[str, ...] = setting(
        (), "arguments of model.block or model.mixer, each as NAME=VALUE"
    )
    heads: int = setting(4, "query heads", Range(at_least=1))
    kv_heads: int = setting(
        0,
        "key/value heads, each shared by heads/kv_heads query heads; 0: as many as heads",
        Range(at_least=0),
    )
    head_dim: int = setting(
        0,
        "size of one head (mla: of the part that is not rotated); 0: width/heads",
        Range(at_least=0),
    )
    attention: str = setting(
        "gqa",
        "gqa: grouped-query attention; mla: multi-head latent attention",
        Choices(("gqa", "mla")),
    )
    query_rank: int = setting(
        0,
        "mla: size of the latent of queries; 0: queries come straight from the residual stream",
        Range(at_least=0),
    )
    kv_rank: int = setting(0, "mla: size of the latent of keys and values", Range(at_least=0))
    rope_head_dim: int = setting(
        0, "mla: size of the rotated part of a head; all heads share its key", Range(at_least=0)
    )
    value_head_dim: int = setting(
        0, "mla: size of one head's values; 0: head_dim", Range(at_least=0)
    )
    mlp_width: int = setting(0, "size of the MLP's hidden layer; 0: 4·width", Range(at_least=0))
    experts: int = setting(
        0,
        "experts in a layer, in place of its MLP; each token uses some of them; 0: no experts",
        Range(at_least=0),
    )
    dense_layers: int = setting(
        0,
        "layers with one MLP for all tokens, before those with experts; not counted in `layers`",
        Range(at_least=0, at_most=MOST_LAYERS),
    )
    experts_per_token: int = setting(2, "experts that each token uses", Range(at_least=1))
    shared_experts: int = setting(0, "additional experts that every token uses", Range(at_least=0))
    expert_width: int = setting(
        0, "size of an expert's hidden layer; 0: mlp_width", Range(at_least=0)
    )
    router: str = setting(
        "softmax",
        "weight of an expert: softmax over all experts, or sigmoid of its own score",
        Choices(("softmax", "sigmoid")),
    )
    router_normalize: str = setting(
        "auto",
        "whether the weights of a token's experts are divided by their sum; auto: if it "
        "uses several",
        Choices(("auto", "always", "never")),
    )
    router_scale: float = setting(
        1.0, "factor on the weights of a token's experts, normalized or not", Range(above=0)
    )
    router_bias: bool = setting(
        True,
        "a bias for each expert, added to its score for the choice of experts, not for "
        "their weights",
    )
    router_groups: int = setting(
        1,
        "groups (nodes) into which the experts are divided; a token uses experts of at most "
        "router_group_limit of them",
        Range(at_least=1),
    )
    router_group_limit: int = setting(
        1, "groups whose experts a token may use, those with the highest scores", Range(at_least=1)
    )
    router_group_best: int = setting(
        2,
        "number of best experts in a group whose scores sum to the group's score "
        "(DeepSeek-V3: 2, V2: 1)",
        Range(at_least=1),
    )
    capacity_factor: float = setting(
        0.0,
        "capacity of an expert, as a multiple of an even share of a sequence's tokens; tokens "
        "beyond it are dropped; 0: no limit, none are dropped",
        Range(at_least=0),
    )
    expert_room: float = setting(
        0.0,
        "capacity of a device for tokens of its experts, as a multiple of their mean number; "
        "tokens beyond it are dropped; 0: memory for the worst case, none are dropped",
        Range(at_least=0),
    )
    balance_rate: float = setting(
        0.001,
        "update of router_bias after each step, which balances the experts' load without a "
        "loss; 0: no update",
        Range(at_least=0),
    )
    balance_loss: float = setting(
        0.0001, "weight of the loss that balances the experts in each sequence", Range(at_least=0)
    )
    z_loss: float = setting(
        0.0, "weight of the router's z-loss, against large logits", Range(at_least=0)
    )
    vocab_size: int = setting(
        257,
        "token ids that the model knows (257: bytes and the document separator)",
        Range(at_least=2),
    )
    norm: str = setting("rmsnorm", "normalisation", Choices(("rmsnorm", "layernorm")))
    norm_weight: str = setting(
        "scale",
        "parameter of a norm: what it multiplies by, or one_plus, that less 1 (Gemma)",
        Choices(("scale", "one_plus")),
    )
    norm_place: str = setting(
        "before",
        "norms of attention and MLP: of their inputs (before), of their outputs before the sum "
        "(after: OLMo 2), or both (Gemma 2)",
        Choices(("before", "after", "both")),
    )
    parallel_block: bool = setting(
        False, "attention and MLP both read one norm of the layer's input (GPT-J, PaLM, Cohere)"
    )
    qk_norm: bool = setting(
        False, "gqa: a norm of each head's queries and one of its keys, before the rotation (Qwen3)"
    )
    qk_norm_over: str = setting(
        "head",
        "qk_norm: numbers that a norm is over, those of a head or of all (projection: OLMo 2)",
        Choices(("head", "projection")),
    )
    attention_scale: float = setting(
        0.0, "factor on scores; 0: 1/sqrt(size of a key)", Range(at_least=0)
    )
    attention_softcap: float = setting(
        0.0,
        "bound c of attention's scores s, which become c·tanh(s/c) (Gemma 2); 0: none",
        Range(at_least=0),
    )
    sinks: bool = setting(
        False,
        "gqa: a learned number for each head, one more score of every token's softmax (gpt-oss)",
    )
    attention_gate: bool = setting(
        False, "gqa: attention's output times the sigmoid of a gate made from the layer's input"
    )
    shared_gate: bool = setting(
        False, "the shared experts' output times the sigmoid of a gate, one number a token"
    )
    norm_epsilon: float = setting(1e-5, "added to the variance in a normalisation", Range(above=0))
    latent_norm_epsilon: float = setting(
        0.0, "mla: norm_epsilon of the latents' norms; 0: norm_epsilon", Range(at_least=0)
    )
    activation: str = setting(
        "swiglu",
        "MLP: gated SiLU or GELU (three matrices), GELU (two), or clamped_swiglu, with "
        "activation_alpha and activation_limit (gpt-oss)",
        Choices(("swiglu", "gelu", "geglu", "clamped_swiglu")),
    )
    activation_alpha: float = setting(
        1.702, "clamped_swiglu: factor inside of the sigmoid", Range(above=0)
    )
    activation_limit: float = setting(
        7.0, "clamped_swiglu: bound of both products of the MLP's input", Range(above=0)
    )
    embedding_scale: float = setting(
        1.0, "factor on the embeddings of tokens (Gemma: sqrt(width))", Range(above=0)
    )
    logit_scale: float = setting(1.0, "factor on the head's logits (Cohere)", Range(above=0))
    logit_softcap: float = setting(
        0.0, "bound c of the head's logits l, which become c·tanh(l/c); 0: none", Range(at_least=0)
    )
    dropout_residual: float = setting(
        0.0,
        "fraction of the numbers that attention and MLP add to the residual stream which training "
        "sets to 0",
        Range(at_least=0, below=1),
    )
    dropout_attention: float = setting(
        0.0,
        "fraction of attention's weights that training sets to 0",
        Range(at_least=0, below=1),
    )
    dropout_embedding: float = setting(
        0.0,
        "fraction of the numbers of embeddings that training sets to 0",
        Range(at_least=0, below=1),
    )
    positions: str = setting(
        "rotary",
        "rotary embedding of queries and keys, a learned position table, or none",
        Choices(("rotary", "learned", "none")),
    )
    rotary_base: float = setting(10000.0, "base of the rotary wavelengths (theta)", Range(above=1))
    rotary_dim: int = setting(
        0,
        "gqa: dimensions of a head that are rotated, its first ones; 0: head_dim, all of them",
        Range(at_least=0),
    )
    rope_scaling: str = setting(
        "none",
        "rotary frequencies for sequences longer than rope_original_length: linear, all divided by "
        "rope_factor; llama3 (Llama 3.1) and yarn, the slow ones",
        Choices(
            ("none", "linear", "llama3", "yarn"),
            refused={
                "dynamic": "changes the frequencies with a sequence's length, and keys in a cache "
                "would keep those of a shorter one",
                "longrope": "has a factor for each dimension, which is not built",
            },
        ),
    )
    rope_factor: float = setting(
        0.0, "rope_scaling: divisor of the rotary frequencies, such as 8", Range(at_least=0)
    )
    rope_original_length: int = setting(
        0, "llama3, yarn: length of the sequences before scaling, in tokens", Range(at_least=0)
    )
    rope_low_freq_factor: float = setting(
        1.0,
        "llama3: turns in the original length up to which a frequency is divided",
        Range(above=0),
    )
    rope_high_freq_factor: float = setting(
        4.0, "llama3: turns in the original length from which a frequency stays", Range(above=0)
    )
    rope_beta_fast: float = setting(
        32.0, "yarn: turns in the original length from which a frequency stays", Range(above=0)
    )
    rope_beta_slow: float = setting(
        1.0,
        "yarn: turns in the original length up to which a frequency is divided",
        Range(above=0),
    )
    rope_truncate: bool = setting(
        True, "yarn: whether the range between beta_fast and beta_slow ends at whole dimensions"
    )
    rope_attention_factor: float = setting(
        0.0,
        "yarn: factor on rotated queries and keys; 0: mscale over mscale_all_dim if both are set, "
        "else 0.1 ln(rope_factor) + 1",
        Range(at_least=0),
    )
    rope_mscale: float = setting(
        0.0,
        "yarn: weight of ln(rope_factor) in the attention factor (DeepSeek)",
        Range(at_least=0),
    )
    rope_mscale_all_dim: float = setting(
        0.0,
        "yarn: weight of ln(rope_factor) by which the attention factor is divided, and mla's "
        "scores are multiplied squared (DeepSeek-V3: 1)",
        Range(at_least=0),
    )
    max_positions: int = setting(
        0,
        "length of the learned position table, in tokens; 0: data.sequence_length",
        Range(at_least=0),
    )
    tied_embeddings: bool = setting(False, "whether the output matrix is the embedding table")
    mtp_depth: int = setting(
        0,
        "tokens beyond the next one that training predicts, each by a module of one layer; 0: none",
        Range(at_least=0),
    )
    mtp_weight: float = setting(0.3, "weight of the mean loss of these predictions", Range(above=0))
    biases: tuple[str, ...] = setting(
        (),
        "parts with biases: qkv, query, key and value matrices (mla: only those that compress); "
        "out, attention's output matrix; mlp, matrices of MLPs and shared experts; experts, of the "
        "others; "
        "router, the router's logits (router_bias is another); norm, layernorm; empty: none",
        Choices(BIASED),
    )
    init_std: float = setting(0.02, "standard deviation of the initial weights", Range(above=0))
    mup_base_width: int = setting(
        0,
        "width of the model for which learning rate and init_std were chosen; μP (models/mup.py) "
        "carries them over to this width, other sizes in proportion; 0: none",
        Range(at_least=0),
    )
    mup_base_head_dim: int = setting(
        0,
        "head_dim of the model of mup_base_width; 0: that of this one, which has more heads",
        Range(at_least=0),
    )
    attention_kernel: str = setting(
        "auto",
        "kernel of attention; auto: the best one that the devices have",
        Choices(("auto", "xla", "cudnn", "splash")),
    )
    attention_backward: str = setting(
        "auto",
        "backward of splash: one fused kernel of 5 products, or jax's two kernels of 7; auto: "
        "fused where its sums fit in vector memory",
        Choices(("auto", "fused", "two_kernels")),
    )
    loss_chunk: int = setting(
        2048, "tokens per device whose logits are in memory at the same time", Range(at_least=1)
    )

    @property
    def is_gated(self) -> bool:
        """Whether an MLP has a matrix for its gate, three in all."""
        return self.activation != "gelu"

    def __post_init__(self) -> None:
        # from Python a dict is more convenient: {"window.rotary_base": 10000}
        for name in ENTRIES:
            object.__setattr__(self, name, as_entries(getattr(self, name)))

    def resolve(self, sequence_length: int) -> "ResolvedModel":
        """This model with its dependent defaults filled in, and biases in the order of BIASED. The
        settings of latent attention become 0 for grouped-query attention, and rotary_dim becomes 0
        for latent attention.

        sequence_length: of the training, in tokens
        """
        # where layers of some kind have it, of_kind (layer_kinds.py) needs its settings
        latent = self.attention == "mla" or any(k.endswith(".attention=mla") for k in self.kinds)
        head_dim = self.head_dim or self.width // self.heads
        mlp_width = self.mlp_width or 4 * self.width
        normalizes = self.router_normalize
        if self.experts and normalizes == "auto":
            normalizes = "always" if self.experts_per_token > 1 else "never"
        return as_type(
            ResolvedModel,
            self,
            kv_heads=self.kv_heads or self.heads,
            head_dim=head_dim,
            query_rank=self.query_rank * latent,
            kv_rank=self.kv_rank * latent,
            rope_head_dim=self.rope_head_dim * latent,
            rotary_dim=(self.rotary_dim or head_dim) * (not latent),
            value_head_dim=(self.value_head_dim or head_dim) * latent,
            mlp_width=mlp_width,
            expert_width=self.expert_width or mlp_width * (self.experts > 0),
            router_normalize=normalizes,
            max_positions=self.max_positions or sequence_length,
            latent_norm_epsilon=(self.latent_norm_epsilon or self.norm_epsilon) * latent,
            biases=tuple(part for part in BIASED if part in self.biases),
        )


class ResolvedModel(ModelConfig):
    """A model each of whose sizes is a number, and not a default that depends on others."""


def ends_with_layers(model: ModelConfig) -> str:
    """The model's setting that puts layers on the stage of the embedding or of the head, whose
    table can then not be split over the stages; "" if none does."""
    return next((name for name in ("mtp_depth", "dense_layers") if getattr(model, name)), "")

"""The models of jaxtrain/models/ in PyTorch, for benchmarks/gpu.py: GPT-2's form, Llama's, and
Mixtral's experts, which drop nothing.

Written as one would for speed in torch 2, in the precision of our recipes: matrices, the residual
stream and products in the compute type; norms, softmaxes, rotary angles, the loss and the router in
float32. Parameters have our names, so that our weights can be copied over (torch_step.py); matrices
lie as torch wants them, [out, in].

    attention    scaled_dot_product_attention, causal. Documents apart: flex_attention over blocks
                 of a mask; on CPU, where that has no gradient, a whole mask
    experts      rows sorted by expert and one grouped_mm for each matrix; in float32, or where
                 torch has none, a loop over the experts

Shape suffixes: B batch, T tokens of a sequence, D width, N heads, K key/value heads, H head
dimension, E experts, R rows of experts, C choices: of all tokens, one after the other.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# a group of grouped_mm begins at a multiple of these: tensor cores read 16 bytes at once
GROUP_ROWS = 16
TINY = 1e-18  # beside a sum of scores, all of which may underflow
GROUPED_MM = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, in float32."""

    def __init__(self, cfg):
        super().__init__()
        self.kind, self.epsilon = cfg.norm, cfg.norm_epsilon
        self.scale = nn.Parameter(torch.empty(cfg.width))
        self.bias = nn.Parameter(torch.empty(cfg.width)) if "norm" in cfg.biases else None

    def forward(self, x):
        y, shape = x.float(), self.scale.shape
        if self.kind == "layernorm":
            return F.layer_norm(y, shape, self.scale, self.bias, self.epsilon).to(x.dtype)
        return F.rms_norm(y, shape, self.scale, self.epsilon).to(x.dtype)


class Dense(nn.Module):
    """A matrix [out, in] of the compute type, with its float32 bias, if any."""

    def __init__(self, n_in, n_out, bias, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))


def rotary_angles(positions_BT, head_dim: int, base: float):
    """int32 [B or 1, T] → cosines and sines, float32 [B or 1, 1, T, H / 2]."""
    half = head_dim // 2
    frequencies_H = base ** (
        -torch.arange(half, device=positions_BT.device, dtype=torch.float32) / half
    )
    angles = positions_BT[:, None, :, None].float() * frequencies_H
    return angles.cos(), angles.sin()


def rotate(x_BNTH, angles):
    """The two halves of a head rotated against each other, in float32."""
    cos, sin = angles
    a, b = x_BNTH.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BNTH.dtype)


def document_mask(segments_BT):
    """The mask by which `attend` keeps documents separate: its blocks, or on CPU all of it."""
    b, t = segments_BT.shape
    if segments_BT.device.type == "cpu":
        same = segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
        return same & torch.ones(t, t, dtype=torch.bool).tril()
    return block_mask(segments_BT)


def block_mask(segments_BT):
    """flex_attention's mask of the same: which blocks of queries and keys see each other at all."""
    from torch.nn.attention.flex_attention import create_block_mask

    def may_look(b, head, query, key):
        return (query >= key) & (segments_BT[b, query] == segments_BT[b, key])

    b, t = segments_BT.shape
    # uncompiled it makes all [T, T] first
    make = torch.compile(create_block_mask) if segments_BT.is_cuda else create_block_mask
    return make(may_look, b, None, t, t, device=segments_BT.device)


def attend(q_BNTH, k_BKTH, v_BKTH, mask=None):
    """Causal attention → [B, N, T, H]; mask: document_mask's, or None."""
    grouped = q_BNTH.shape[1] != k_BKTH.shape[1]
    if mask is None or torch.is_tensor(mask):
        return F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    return flex(q_BNTH, k_BKTH, v_BKTH, mask, grouped)


def flex(q_BNTH, k_BKTH, v_BKTH, mask, grouped: bool):
    """Attention by flex_attention, of which torch.compile makes a kernel → [B, N, T, H]."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q_BNTH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, cfg, dtype):
        super().__init__()
        self.head_dim = cfg.head_dim
        d, n, k = cfg.width, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        self.query = Dense(d, n, "qkv" in cfg.biases, dtype)
        self.key = Dense(d, k, "qkv" in cfg.biases, dtype)
        self.value = Dense(d, k, "qkv" in cfg.biases, dtype)
        self.out = Dense(n, d, "out" in cfg.biases, dtype)

    def forward(self, x_BTD, angles, mask):
        by_head = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = by_head(self.query(x_BTD)), by_head(self.key(x_BTD)), by_head(self.value(x_BTD))
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        return self.out(attend(q, k, v, mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU, or GELU in its tanh form."""

    def __init__(self, cfg, dtype):
        super().__init__()
        bias = "mlp" in cfg.biases
        self.up = Dense(cfg.width, cfg.mlp_width, bias, dtype)
        self.gate = (
            Dense(cfg.width, cfg.mlp_width, bias, dtype) if cfg.activation == "swiglu" else None
        )
        self.down = Dense(cfg.mlp_width, cfg.width, bias, dtype)

    def forward(self, x):
        """→ the result, and a router's losses: none."""
        h = (
            F.gelu(self.up(x), approximate="tanh")
            if self.gate is None
            else F.silu(self.gate(x)) * self.up(x)
        )
        return self.down(h), x.new_zeros((), dtype=torch.float32)


class Router(nn.Module):
    """Weights and numbers of the experts that each token takes, by a softmax over all in
    float32."""

    def __init__(self, cfg, batch_size):
        super().__init__()
        self.experts, self.choices, self.scale = (
            cfg.experts,
            cfg.experts_per_token,
            cfg.router_scale,
        )
        self.normalized = cfg.router_normalize == "always"
        self.balance_loss, self.z_loss, self.batch_size = cfg.balance_loss, cfg.z_loss, batch_size
        self.weight = nn.Parameter(torch.empty(cfg.experts, cfg.width))

    def forward(self, x_BTD):
        """→ gates float32 [B, T, choices], chosen experts int64 of the same shape, the router's
        losses as a part of the step's mean."""
        logits_BTE = F.linear(x_BTD.float(), self.weight)
        scores_BTE = logits_BTE.softmax(-1)
        gates, chosen = scores_BTE.topk(self.choices, -1)
        if self.normalized:
            gates = gates / (gates.sum(-1, keepdim=True) + TINY)
        loss, tokens = logits_BTE.new_zeros(()), x_BTD.shape[1]
        if self.balance_loss:
            load_BE = counts(chosen.flatten(1), self.experts).float() * (
                self.experts / self.choices / tokens
            )
            loss = loss + self.balance_loss * (load_BE * scores_BTE.mean(1)).sum()
        if self.z_loss:
            loss = loss + self.z_loss * (logits_BTE.logsumexp(-1) ** 2).sum() / tokens
        return gates * self.scale, chosen, loss / self.batch_size


def counts(chosen, experts: int):
    """int64 [..., choices] → how many chose each expert, int64 [..., E]."""
    return (chosen[..., None] == torch.arange(experts, device=chosen.device)).sum(-2)


def rows_of(chosen_C, experts: int):
    """Where the choices' rows lie: sorted by expert, each group from a multiple of GROUP_ROWS on,
    some rows left behind the last.

    → the choice of each row, or C where it is empty; the row of each choice; where each expert's
    rows end, int32 [E].
    """
    choices = chosen_C.numel()
    order_C = chosen_C.argsort(stable=True)
    sorted_C = chosen_C[order_C]
    sizes_E = counts(chosen_C, experts)
    room_E = (sizes_E + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS
    ends_E = room_E.cumsum(0)
    first_E = ends_E - room_E - (sizes_E.cumsum(0) - sizes_E)
    sorted_row_C = first_E[sorted_C] + torch.arange(choices, device=chosen_C.device)
    rows = -(-(choices + experts * GROUP_ROWS) // GROUP_ROWS) * GROUP_ROWS
    choice_R = torch.full((rows,), choices, device=chosen_C.device).scatter(
        0, sorted_row_C, order_C
    )
    row_C = torch.empty_like(order_C).scatter(0, order_C, sorted_row_C)
    return choice_R, row_C, ends_E.int()


def product(x_RI, weights_EOI, ends_E):
    """The product of each row with its expert's matrix → [R, O].

    Rows behind the last group are undefined.
    """
    if GROUPED_MM is not None and x_RI.dtype == torch.bfloat16:
        return GROUPED_MM(x_RI, weights_EOI.transpose(-2, -1), offs=ends_E)
    return product_by_loop(x_RI, weights_EOI, ends_E)


@torch.compiler.disable
def product_by_loop(x_RI, weights_EOI, ends_E):
    """The product of each row with its expert's matrix, expert by expert; zeros behind the last
    group."""
    ends = [0, *ends_E.tolist()]
    parts = [
        x_RI[begin:end] @ matrix.T
        for (begin, end), matrix in zip(itertools.pairwise(ends), weights_EOI, strict=True)
    ]
    return torch.cat([*parts, x_RI.new_zeros(x_RI.shape[0] - ends[-1], weights_EOI.shape[1])])


class MoE(nn.Module):
    """Experts, each a SwiGLU or GELU MLP, of which a token takes some. Every token is served."""

    def __init__(self, cfg, batch_size, dtype):
        super().__init__()
        e, d, f = cfg.experts, cfg.width, cfg.expert_width
        self.router = Router(cfg, batch_size)
        self.up = nn.Parameter(torch.empty(e, f, d, dtype=dtype))
        self.gate = (
            nn.Parameter(torch.empty(e, f, d, dtype=dtype)) if cfg.activation == "swiglu" else None
        )
        self.down = nn.Parameter(torch.empty(e, d, f, dtype=dtype))

    def forward(self, x_BTD):
        """→ the result [B, T, D], and the router's losses."""
        gates, chosen, loss = self.router(x_BTD)
        choice_R, row_C, ends_E = rows_of(chosen.flatten(), self.router.experts)
        # An empty row reads a token of zeros, and a gate of zero: what comes back for it goes
        # there, too.
        tokens = torch.cat([x_BTD.flatten(0, 1), x_BTD.new_zeros(1, x_BTD.shape[-1])])
        gates_R = torch.cat([gates.flatten(), gates.new_zeros(1)])[choice_R]
        x_RD = tokens[choice_R // self.router.choices]
        h = product(x_RD, self.up, ends_E)
        h = (
            F.gelu(h, approximate="tanh")
            if self.gate is None
            else F.silu(product(x_RD, self.gate, ends_E)) * h
        )
        y_RD = product(h * gates_R[:, None].to(h.dtype), self.down, ends_E)
        return y_RD[row_C].unflatten(0, (-1, self.router.choices)).sum(1).view_as(x_BTD), loss


class Block(nn.Module):
    """Pre-norm attention and MLP. With remat `full` its inside is computed again in the
    backward."""

    def __init__(self, cfg, batch_size, dtype, remat):
        super().__init__()
        self.remat = remat
        self.attention_norm, self.mlp_norm = Norm(cfg), Norm(cfg)
        self.attention = Attention(cfg, dtype)
        self.mlp = MoE(cfg, batch_size, dtype) if cfg.experts else MLP(cfg, dtype)

    def layer(self, x_BTD, angles, mask):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), angles, mask)
        y_BTD, loss = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + y_BTD, loss

    def forward(self, x_BTD, angles, mask):
        """→ [B, T, D], and the router's losses."""
        if self.remat == "full":
            return checkpoint(self.layer, x_BTD, angles, mask, use_reentrant=False)
        return self.layer(x_BTD, angles, mask)


class Embedder(nn.Module):
    """Token embeddings, plus learned positions where the model has them."""

    def __init__(self, cfg, rows, dtype):
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, cfg.width, dtype=dtype))
        learned = cfg.positions == "learned"
        self.positions = (
            nn.Parameter(torch.empty(cfg.max_positions, cfg.width, dtype=dtype))
            if learned
            else None
        )

    def forward(self, tokens_BT, positions_BT):
        x_BTD = F.embedding(tokens_BT, self.table)
        return (
            x_BTD if self.positions is None else x_BTD + F.embedding(positions_BT, self.positions)
        )


class Head(nn.Module):
    """Final norm, logits without those of padding rows, and the loss in float32."""

    def __init__(self, cfg, rows, dtype):
        super().__init__()
        self.vocab_size = cfg.vocab_size
        self.norm = Norm(cfg)
        self.table = (
            None if cfg.tied_embeddings else nn.Parameter(torch.empty(rows, cfg.width, dtype=dtype))
        )

    def forward(self, x_BTD, tied_table, targets_BT, weights_BT):
        """→ the weighted sum of the tokens' losses."""
        logits = F.linear(self.norm(x_BTD), tied_table if self.table is None else self.table)[
            ..., : self.vocab_size
        ]
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), targets_BT.flatten(), reduction="none"
        )
        return (losses * weights_BT.flatten()).sum()


class Transformer(nn.Module):
    """The model.

    cfg:        a resolved ModelConfig's values
    rows:       rows of the vocabulary's tables in memory
    batch_size: sequences in a step
    """

    def __init__(self, cfg, rows: int, batch_size: int, dtype, remat: str):
        super().__init__()
        self.cfg = cfg
        self.embed = Embedder(cfg, rows, dtype)
        self.layers = nn.ModuleList(Block(cfg, batch_size, dtype, remat) for _ in range(cfg.layers))
        self.head = Head(cfg, rows, dtype)

    def forward(self, batch):
        """batch: tokens, targets int64 [B, T], weights float32 [B, T], positions int64 [B or 1, T],
        and a mask (document_mask) or None → (the weighted sum of the tokens' losses, the routers'
        losses)."""
        x_BTD, router_loss = self.embed(batch["tokens"], batch["positions"]), 0.0
        rotary = self.cfg.positions == "rotary"
        angles = (
            rotary_angles(batch["positions"], self.cfg.head_dim, self.cfg.rotary_base)
            if rotary
            else None
        )
        for block in self.layers:
            x_BTD, loss = block(x_BTD, angles, batch["mask"])
            router_loss = router_loss + loss
        return self.head(x_BTD, self.embed.table, batch["targets"], batch["weights"]), router_loss

    def compile_by(self, unit: str):
        """The model compiled by torch.compile: `model` in one piece, `blocks` one by one, whose
        code is compiled once, or `none`."""
        if unit == "none":
            return self
        if unit == "model":
            return torch.compile(self, dynamic=False)
        for part in (*self.layers, self.head):
            part.compile(dynamic=False)
        return self

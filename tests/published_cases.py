"""Modules whose weights have the names and the layout of the paper's released code, written from what it computes.

Slow and plain: every formula is spelled out pair by pair, without any function of ours.
"""

import math

import torch
from torch import nn

CLUSTERS = [11, 17]


def mixture_weights(scores, pi, hidden, *, hard=False, eps=0.0):
    """``scores``: one ``[B, H, Nq, Nk]`` for each component; ``hidden``: True where a query does not see a key."""
    if hard:
        best = torch.stack(scores).amax(0).masked_fill(hidden, -math.inf)
        return best.softmax(dim=-1)
    kernel = sum(weight * score.exp() for weight, score in zip(pi, scores, strict=True)).masked_fill(hidden, 0.0)
    return kernel / (kernel.sum(dim=-1, keepdim=True) + eps)


def distances(query, key):
    """``|q_i - k_j|^2``, pair by pair."""
    return (query[..., :, None, :] - key[..., None, :, :]).square().sum(dim=-1)


class Kernel(nn.Module):
    """Shifts, ``mu``, and the pair ``pi``."""

    def __init__(self, heads, width, hard):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(2, heads, width))
        self.pi = None if hard else nn.Parameter(torch.tensor([0.3, 0.9]))


class ArenaMixture(nn.Module):
    def __init__(self, kind, heads, width):
        super().__init__()
        hard = kind.endswith("-hard")
        self.pi = None
        if kind.startswith("smgk"):
            self.multi_gauss_kernel = Kernel(heads, width, hard)
            # Registered twice, as theirs is.
            self.pi = self.multi_gauss_kernel.pi
        elif kind.startswith("mgk") and not hard:
            self.pi = nn.Parameter(torch.tensor([1.7, 0.4]))


class ArenaAttention(nn.Module):
    def __init__(self, kind, size, heads, width):
        super().__init__()
        self.kind, self.heads, self.width = kind, heads, width
        self.W_q, self.W_k, self.W_v = (nn.Linear(size, heads * width) for _ in range(3))
        if kind.startswith("mgk"):
            self.W_k2 = nn.Linear(size, heads * width)
        self.attn = ArenaMixture(kind, heads, width)
        self.ff = nn.Linear(heads * width, size)

    def forward(self, x, mask):
        def split(y):
            return y.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

        query, key, value = split(self.W_q(x)), split(self.W_k(x)), split(self.W_v(x))
        hidden = ~mask[:, None, None, :]
        if self.kind == "softmax":
            weights = (query @ key.mT / self.width**0.5).masked_fill(hidden, -math.inf).softmax(dim=-1)
        else:
            if self.kind.startswith("mgk"):
                keys = [key, split(self.W_k2(x))]
            else:
                keys = [key - mu[:, None] for mu in self.attn.multi_gauss_kernel.mu]
            scores = [-distances(query, each) / (2 * self.width**0.5) for each in keys]
            pi = None if self.attn.pi is None else self.attn.pi.clamp(0, 1)
            weights = mixture_weights(scores, pi, hidden, hard=self.kind.endswith("-hard"))
        return self.ff((weights @ value).transpose(1, 2).flatten(2))


class ArenaLayer(nn.Module):
    def __init__(self, kind, size, heads, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mha = ArenaAttention(kind, size, heads, width)
        self.mlpblock = nn.Sequential(
            nn.Linear(size, 2 * size), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * size, size), nn.Dropout(0.1)
        )

    def forward(self, x, mask):
        x = x + self.mha(self.norm1(x), mask)
        return x + self.mlpblock(self.norm2(x))


class ArenaEmbeddings(nn.Module):
    def __init__(self, size, length):
        super().__init__()
        self.word_embeddings = nn.Embedding(29, size)
        self.position_embeddings = nn.Embedding(length, size)


class ArenaTrunk(nn.Module):
    def __init__(self, kinds, size, heads, width, length):
        super().__init__()
        self.embeddings = ArenaEmbeddings(size, length)
        for number, kind in enumerate(kinds):
            setattr(self, f"transformer_{number}", ArenaLayer(kind, size, heads, width))
        self.depth = len(kinds)
        self.norm = nn.LayerNorm(size)

    def forward(self, tokens, mask):
        x = self.embeddings.word_embeddings(tokens) + self.embeddings.position_embeddings.weight
        for number in range(self.depth):
            x = getattr(self, f"transformer_{number}")(x, mask.bool())
        return self.norm(x) * mask[..., None]


class ArenaHead(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        self.mlpblock = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, 5))


class ArenaClassifier(nn.Module):
    """Of one sequence, or of a pair. Sequences are padded to ``length``, by which their sum is divided."""

    def __init__(self, kinds, *, pair=False, size=12, heads=2, width=6, length=16):
        super().__init__()
        self.length = length
        self.model = ArenaTrunk(kinds, size, heads, width, length)
        self.seq_classifer = ArenaHead(4 * size if pair else size, 7)

    def pooled(self, tokens, mask):
        spare = self.length - tokens.shape[1]
        tokens, mask = (nn.functional.pad(each, (0, spare)) for each in (tokens, mask.bool()))
        return self.model(tokens, mask).mean(dim=1)

    def forward(self, input_ids, attention_mask, pair_input_ids=None, pair_attention_mask=None):
        a = self.pooled(input_ids, attention_mask)
        if pair_input_ids is not None:
            b = self.pooled(pair_input_ids, pair_attention_mask)
            a = torch.cat([a, b, a * b, a - b], dim=-1)
        return self.seq_classifer.mlpblock(a)


class LanguageAttention(nn.Module):
    """``kind`` is softmax, or one of their ``update_mode``: hard, hard2keys, rbf, rbf2keys, soft."""

    def __init__(self, kind, size, heads, width, window, eps):
        super().__init__()
        self.kind, self.heads, self.width, self.eps = kind, heads, width, eps
        self.q_net = nn.Linear(size, heads * width, bias=False)
        self.kv_net = nn.Linear(size, (3 if kind.endswith("2keys") else 2) * heads * width, bias=False)
        self.o_net = nn.Linear(heads * width, size, bias=False)
        self.layer_norm = nn.LayerNorm(size)
        if kind in ("hard", "rbf", "soft"):
            self.mu = nn.Parameter(torch.randn(2, heads, width))
        if kind.startswith("rbf"):
            for number in range(2):
                prior = torch.rand(heads, 1, 1, 1).expand(-1, -1, -1, window).clone()
                setattr(self, f"pi{number}", nn.Parameter(prior))
        if kind == "soft":
            self.register_buffer("pi", torch.rand(heads, 1, 1, 1).expand(-1, -1, -1, window).clone())

    def forward(self, x):
        def split(y):
            return y.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

        query = split(self.q_net(x))
        *keys, value = (split(part) for part in self.kv_net(x).split(self.heads * self.width, dim=-1))
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        root = self.width**0.5
        if self.kind == "softmax":
            weights = (query @ keys[0].mT / root).masked_fill(hidden, -math.inf).softmax(dim=-1)
        else:
            if not self.kind.endswith("2keys"):
                keys = [keys[0] - mu[:, None] for mu in self.mu]
            # The second component is narrower.
            scores = [-distances(query, keys[0]) / (2 * root), -1.5 * distances(query, keys[1]) / root]
            pi = None
            if self.kind.startswith("rbf"):
                pi = [each.clamp(0, 1)[:, 0, :, :length] for each in (self.pi0, self.pi1)]
            if self.kind == "soft":
                pi = [self.pi[:, 0, :, :length], 1 - self.pi[:, 0, :, :length]]
            weights = mixture_weights(scores, pi, hidden, hard=self.kind.startswith("hard"), eps=self.eps)
        return self.layer_norm(x + self.o_net((weights @ value).transpose(1, 2).flatten(2)))


class LanguageFeedForward(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.CoreNet = nn.Sequential(
            nn.Linear(size, 3 * size), nn.ReLU(), nn.Dropout(0.1), nn.Linear(3 * size, size), nn.Dropout(0.1)
        )
        self.layer_norm = nn.LayerNorm(size)

    def forward(self, x):
        return self.layer_norm(x + self.CoreNet(x))


class LanguageLayer(nn.Module):
    def __init__(self, *options):
        super().__init__()
        self.dec_attn = LanguageAttention(*options)
        self.pos_ff = LanguageFeedForward(options[1])


class LanguageEmbeddings(nn.Module):
    def __init__(self, vocabulary, size):
        super().__init__()
        self.emb_layers = nn.ModuleList([nn.Embedding(vocabulary, size)])
        self.emb_projs = nn.ParameterList()


class LanguageSoftmax(nn.Module):
    """The clusters' logits stand after those of the first words, the last cluster first."""

    def __init__(self, vocabulary, size, clusters):
        super().__init__()
        self.cluster_weight = nn.Parameter(torch.randn(clusters, size))
        self.cluster_bias = nn.Parameter(torch.randn(clusters))
        self.out_layers = nn.ModuleList([nn.Linear(size, vocabulary)])

    def log_probabilities(self, x):
        words = self.out_layers[0](x)
        ends = [*CLUSTERS, words.shape[-1]]
        clusters = x @ self.cluster_weight.T + self.cluster_bias
        head = torch.cat([words[..., : ends[0]], clusters], dim=-1).log_softmax(dim=-1)
        parts = [head[..., : ends[0]]]
        for number in range(1, len(ends)):
            within = words[..., ends[number - 1] : ends[number]].log_softmax(dim=-1)
            parts.append(within + head[..., head.shape[-1] - number, None])
        return torch.cat(parts, dim=-1)


class LanguagePositions(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0.0, size, 2.0) / size))


class LanguageModel(nn.Module):
    def __init__(self, kind, *, size=12, heads=2, width=6, layers=2, vocabulary=23, window=16, eps=0.0, tied=True):
        super().__init__()
        self.size = size
        self.word_emb = LanguageEmbeddings(vocabulary, size)
        self.layers = nn.ModuleList(LanguageLayer(kind, size, heads, width, window, eps) for _ in range(layers))
        self.crit = LanguageSoftmax(vocabulary, size, len(CLUSTERS))
        if tied:
            self.crit.out_layers[0].weight = self.word_emb.emb_layers[0].weight
        self.pos_emb = LanguagePositions(size)

    def forward(self, tokens):
        """Log-probabilities of all words ``[B, N, V]``. Positions are counted back from the last token, in fp32."""
        back = torch.arange(tokens.shape[1] - 1, -1, -1.0)
        rate = 10000.0 ** (-torch.arange(0, self.size, 2, dtype=torch.float32) / self.size)
        angle = back[:, None] * rate
        table = self.word_emb.emb_layers[0].weight
        x = table[tokens] * self.size**0.5 + torch.cat([angle.sin(), angle.cos()], dim=-1).to(table.dtype)
        for layer in self.layers:
            x = layer.pos_ff(layer.dec_attn(x))
        return self.crit.log_probabilities(x)

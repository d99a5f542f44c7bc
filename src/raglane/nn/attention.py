"""Multi-head attention over the elements of sequences, without padding.

NOTE (bits): the last bits of torch's products depend on their shapes, the number of threads and the
addresses of their operands. So on a CPU each sequence is one call of torch's kernel, on copies at
the start of an allocation: neither other sequences nor its place in the batch change its bits.
Sequences of equal length in one call would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane._utils.checks import (
    check_count,
    check_dropout,
    check_dtype,
    check_fits,
    check_flag,
    check_kind,
)
from raglane._utils.memory import check_pairs
from raglane._utils.messages import quote
from raglane._utils.tracing import is_exporting, never_traced, refuse_jit_trace
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.linear import RowLinear, row_linear
from raglane.ragged import Ragged


class Attention(nn.Module):
    """Multi-head attention of the elements of each sequence over those of a memory, by default the
    sequence itself.

    It equals :class:`torch.nn.MultiheadAttention` on each sequence without others, and its
    ``state_dict`` has the same names and shapes. For a query element ``x`` and the elements ``m_t``
    of the memory, each head computes (Vaswani et al. 2017, "Attention is all you need",
    arXiv:1706.03762, equation 1)::

        q = Q x,  k_t = K m_t,  v_t = V m_t,  w = softmax over t of q @ k_t / sqrt(size of a head),  sum_t w_t v_t

    and a linear layer combines the heads. Over a memory without elements the sum is 0, so the
    result is its bias.

    On a CPU each sequence is one call of :func:`torch.nn.functional.scaled_dot_product_attention`,
    which stores no weights, except with dropout. In evaluation mode, in float32 and float64, the
    output of a sequence has the same bits in any batch at one number of threads. On a GPU, values
    of float16 and bfloat16 without dropout are one call of
    :func:`torch.nn.attention.varlen.varlen_attn`. Derivatives of gradients require torch's plain
    kernel, within ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.

    Args:
        embed_dim: the number of features of a query element and of the result.
        num_heads: the number of heads; it must divide ``embed_dim``.
        kdim: the number of features of an element of the memory, from which keys and values are
            computed; None for ``embed_dim``.
        causal: True if an element reads only elements of the memory up to its own step. The lengths
            of the memory are then those of the query.
        dropout: in training, the probability that a weight is zeroed.
        bias: True to add learned biases.
        device, dtype: of the parameters.

    Attributes:
        in_proj_weight: ``(3 * embed_dim, embed_dim)``: Q, K and V. With another ``kdim`` they are
            ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``.
        in_proj_bias: ``(3 * embed_dim,)``, or None.
        out_proj: the linear layer from ``embed_dim`` to ``embed_dim``.

    Raises:
        ArgumentError: an argument is out of its range, or ``num_heads`` does not divide ``embed_dim``.

    Example:
        An encoder of a recurrent layer and attention, with a residual connection and layer norm:

        >>> from raglane.nn import GRU
        >>> recurrent, attention, norm = GRU(8, 16), Attention(16, num_heads=4), torch.nn.LayerNorm(16)
        >>> batch = Ragged([torch.randn(5, 8), torch.randn(2, 8)])
        >>> hidden, _ = recurrent(batch)
        >>> encoded = (hidden + attention(hidden)).map(norm)
        >>> encoded.values.shape, encoded.lengths.tolist()
        (torch.Size([7, 16]), [5, 2])
    """

    in_proj_weight: Tensor
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    in_proj_bias: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        kdim: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = check_count("embed_dim", embed_dim)
        self.num_heads = check_count("num_heads", num_heads)
        self.kdim = embed_dim if kdim is None else check_count("kdim", kdim)
        self.causal = check_flag("causal", causal)
        self.dropout = check_dropout(dropout)
        check_dtype(dtype)
        if embed_dim % num_heads != 0:
            rule = f"a divisor of embed_dim, {embed_dim}"
            raise ArgumentError(
                "num_heads", quote(num_heads), rule, f"pass a divisor of {embed_dim}"
            )
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        width = self.kdim
        shapes = {"in_proj_weight": (3 * embed_dim, embed_dim)}
        if width != embed_dim:
            shapes = {
                f"{name}_proj_weight": (embed_dim, embed_dim if name == "q" else width)
                for name in "qkv"
            }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **placed)))
        self.in_proj_bias = (
            nn.Parameter(torch.empty(3 * embed_dim, **placed)) if check_flag("bias", bias) else None
        )
        self.reset_parameters()
        self.out_proj = RowLinear(embed_dim, embed_dim, bias=bias, **placed)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def reset_parameters(self) -> None:
        """Initialise the parameters of this module; those of ``out_proj`` are its own."""
        for parameter in self.parameters(recurse=False):
            (nn.init.xavier_uniform_ if parameter.dim() == 2 else nn.init.zeros_)(parameter)

    def forward(self, query: Ragged, memory: Ragged | None = None) -> Ragged:
        """Return the attention of each query element over the memory of its sequence.

        Args:
            query: ``(N, embed_dim)``; lengths may be 0.
            memory: as many sequences as ``query``, ``(M, kdim)``; lengths may be 0. None
                for ``query``.

        Returns:
            ``(N, embed_dim)``, with the lengths of ``query``.

        Raises:
            ArgumentTypeError: an argument is not a Ragged.
            ShapeError: sizes, dtypes, devices or numbers of sequences do not match, or with
                ``causal`` the lengths.
            ArgumentError: with dropout, the weights do not fit into memory; or the call is
                exported.
        """
        memory = query if memory is None else memory
        self._check("query", query, self.embed_dim)
        self._check("memory", memory, self.kdim)
        if len(query) != len(memory):
            got = f"{len(memory)} sequences"
            rule = f"a batch of {len(query)} sequences, like query"
            raise ShapeError(
                "memory", got, rule, "pass one memory per sequence, empty if it has none"
            )
        if self.causal:
            memory._needs_lengths_of("memory", query, "query")
        linear = F.linear if self.training else row_linear
        sizes = (self.embed_dim, 2 * self.embed_dim)
        of_query, of_memory = self._weights()
        biases = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        queries = torch.unflatten(
            linear(query.values, of_query, biases[0]), 1, (self.num_heads, -1)
        )
        pairs = torch.unflatten(
            linear(memory.values, of_memory, biases[1]), 1, (2, self.num_heads, -1)
        )
        attended = _attend(
            queries, pairs, query, memory, self.causal, self.dropout if self.training else 0.0
        )
        return query._like(self.out_proj(attended.flatten(1)))

    if TYPE_CHECKING:

        def __call__(self, query: Ragged, memory: Ragged | None = None) -> Ragged: ...  # noqa: D102

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of queries, and of keys and values."""
        if self.kdim == self.embed_dim:
            return self.in_proj_weight[: self.embed_dim], self.in_proj_weight[self.embed_dim :]
        return self.q_proj_weight, torch.cat([self.k_proj_weight, self.v_proj_weight])

    def extra_repr(self) -> str:
        """Return the sizes and options."""
        memory = ""
        if self.kdim != self.embed_dim:
            memory = f"kdim={self.kdim}, "
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, {memory}"
            f"causal={self.causal}, dropout={self.dropout}"
        )

    def _check(self, name: str, batch: Any, features: int) -> None:
        check_kind(name, batch, Ragged, "a Ragged", "wrap a list of sequences with rl.Ragged")
        if tuple(batch.feature_shape) != (features,):
            got = f"elements of shape {tuple(batch.feature_shape)}"
            rule = f"elements of {features} features"
            raise ShapeError(name, got, rule, "build the layer with the sizes of its inputs")
        check_fits(name, batch.values, self.out_proj.weight)


@never_traced
def _attend(
    queries: Tensor, pairs: Tensor, query: Ragged, memory: Ragged, causal: bool, dropout: float
) -> Tensor:
    """Return sums of values, as ``queries`` (N, heads, D), weighted by keys; ``pairs`` (M, 2,
    heads, D) has both.
    """
    refuse_jit_trace("a layer Attention")
    if is_exporting():
        rule = "called outside of torch.export, whose graph would have fixed lengths"
        fix = "export the other layers"
        raise ArgumentError("Attention", "a call within it", rule, fix)
    if not len(query):
        return queries
    if _has_varlen(queries, query, memory, dropout):
        from torch.nn.attention.varlen import varlen_attn

        keys, values = pairs.unbind(1)
        ends = (query.cu_seqlens, memory.cu_seqlens)
        longest = (query.max_length, memory.max_length)
        window = (-1, 0 if causal else -1)
        output = varlen_attn(queries, keys, values, *ends, *longest, window_size=window)
        return cast(Tensor, output)
    if dropout and queries.is_cpu:
        itemsize = 2 * queries.shape[1] * queries.itemsize
        check_pairs(query.lengths_cpu, memory.lengths_cpu, itemsize)
    outputs = []
    # One row of heads before steps, as torch's kernel takes them.
    queries_of = queries.transpose(0, 1).unsqueeze(0).split(query.lengths_cpu.tolist(), 2)
    pairs_of = pairs.permute(1, 2, 0, 3).unsqueeze(1).split(memory.lengths_cpu.tolist(), 3)
    for rows, elements in zip(queries_of, pairs_of, strict=True):
        rows = rows.clone(memory_format=torch.contiguous_format)
        keys, values = elements.clone(memory_format=torch.contiguous_format).unbind(0)
        if rows.numel() and keys.numel():
            output = F.scaled_dot_product_attention(
                rows, keys, values, dropout_p=dropout, is_causal=causal
            )
        else:
            output = rows @ keys.transpose(2, 3) @ values  # zeros
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _has_varlen(queries: Tensor, query: Ragged, memory: Ragged, dropout: float) -> bool:
    """Return True if torch's kernel for variable lengths supports a call."""
    return (
        queries.is_cuda
        and queries.dtype in (torch.float16, torch.bfloat16)
        and not dropout
        and queries.shape[2] % 8 == 0
        and queries.shape[2] <= 256
        and torch.cuda.get_device_capability(queries.device) >= (8, 0)
        and (memory is query or bool((memory.lengths_cpu > 0).all()))
    )

"""Operations of the prompt pass that torch runs itself: matrix products and attention."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.op import Op
from ..model.weights import Linear

MASK_LIMIT = 2**21  # entries of an attention mask on the CPU


def linear(x: torch.Tensor, weights: Linear, out: torch.Tensor) -> None:
    """out [rows, out_features] = x [rows, in_features] @ weight.T + bias."""
    if weights.bias is None:
        torch.mm(x, weights.weight.T, out=out)
    else:
        torch.addmm(weights.bias, x, weights.weight.T, out=out)


def linear_bytes(x: torch.Tensor, weights: Linear, out: torch.Tensor) -> int:
    return x.nbytes + weights.weight.nbytes + out.nbytes


LINEAR = Op(linear, linear, linear_bytes, outputs=("out",))


def attend(q, keys, values, out, window: int, scale: float) -> None:
    """Causal attention of the last rows: q [n, heads, d]; keys, values [kv_heads, end, d]; out [n, heads * d].

    window: 0, or the positions attended to.
    """
    n, end = q.shape[0], keys.shape[1]
    if window:
        first = max(end - n - window + 1, 0)
        keys, values = keys[:, first:], values[:, first:]
        end -= first
    q, k, v = q.transpose(0, 1)[None], keys[None], values[None]
    heads_first = out.view(n, q.shape[1], -1).transpose(0, 1)
    if q.device.type == "cpu":
        _attend_masked(q, k, v, heads_first, window, scale)
        return
    grouped = k.shape[1] != q.shape[1]
    if grouped and (q.dtype == torch.float32 or window):
        # In fp32 no fused backend groups heads, nor with a mask; expanding keeps the memory-efficient one.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    if window:
        behind = torch.arange(end - n, end, device=q.device)[:, None] - torch.arange(end, device=q.device)[None, :]
        causal = {"attn_mask": (behind >= 0) & (behind < window)}
    elif n != end:
        from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler, a second of every start

        causal = {"attn_mask": causal_lower_right(n, end)}
    else:
        causal = {"is_causal": True}
    heads_first.copy_(scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped, **causal)[0])


def _attend_masked(q, k, v, out, window: int, scale: float) -> None:
    """The same on the CPU, as many rows at a time as keep the mask below MASK_LIMIT entries."""
    n, end = q.shape[2], k.shape[2]
    keys, grouped = torch.arange(end, dtype=torch.int32), k.shape[1] != q.shape[1]
    done = 0
    for rows in torch.arange(end - n, end, dtype=torch.int32).split(max(MASK_LIMIT // end, 1)):
        behind = rows[:, None] - keys
        mask = (behind >= 0) & (behind < window) if window else behind >= 0
        part = slice(done, done + len(rows))
        out[:, part] = scaled_dot_product_attention(
            q[:, :, part], k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )[0]
        done += len(rows)


def attend_bytes(q, keys, values, out, window: int, scale: float) -> int:
    return q.nbytes + keys.nbytes + values.nbytes + out.nbytes


ATTEND = Op(attend, attend, attend_bytes, outputs=("out",))

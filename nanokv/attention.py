"""Attention over KV memory. Query heads stay grouped under the KV head they share: q is [H, G, S, D].

One function per question. `attend_prompt`: what do the tokens just read attend to?
(fused kernels, the answer alone). `watch_prompt`: how much did the last of them look at each
token? (block by block, the evidence alone; no S x S matrix ever exists). `attend_slots`: what does
a query find in the slots? (fused again). `watch_slots`: and how much did it look at each?
(an explicit softmax, so answer and evidence come together).

Softmax does not care about order, so nothing here knows which slot holds which token: a mask
computed from positions says what may be read. K and V are never repeated per query head.
"""

from collections.abc import Iterator

from . import sweep
from .later import F, Tensor, torch

ROWS = 128  # query rows per fused call with a mask: bounds the mask, whatever the prompt's length
WATCHED = 128  # query rows per block of evidence, at most
EVIDENCE = 1 << 24  # probabilities per block of evidence: fewer rows of a longer text, so that the peak stays


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of S new tokens to themselves and to what came before them.

    q [H, G, S, D]; k, v [H, T, D] in time order, the S new tokens last, T >= S -> [H, G, S, D].
    """
    (G, S), T = q.shape[1:3], k.shape[1]
    k, v = (x[:, None].expand(-1, G, -1, -1) for x in (k, v))  # a view: no K or V is copied
    if T == S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    # is_causal would align the first query with the first key: wrong behind a prefix
    return (_joined if q.device.type == "cpu" else _masked)(q, k, v, scale)


def _joined(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The prefix, where nothing is dark, and the new tokens, which are causal: two fused calls, a third faster than a mask.

    A softmax over two parts is a mean of theirs: each part's weight is its share of the sum of exponentials.
    """
    fused, before = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, k.shape[2] - q.shape[2]
    old, old_sum = fused(q, k[:, :, :before], v[:, :, :before], scale=scale)
    new, new_sum = fused(q, k[:, :, before:], v[:, :, before:], 0.0, True, scale=scale)
    share = torch.sigmoid(old_sum - new_sum)[..., None]  # the sums come as logarithms
    return new.lerp_(old, share.to(q.dtype))


def _masked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The same through a mask, for devices whose kernel does not give its sums: a few rows at a time, to bound the mask."""
    S, T, out = q.shape[2], k.shape[2], torch.empty_like(q)
    for a in range(0, S, ROWS):
        b = min(a + ROWS, S)
        seen = T - S + b
        future = torch.ones(b - a, seen, dtype=torch.bool, device=q.device).triu_(T - S + a + 1)
        mask = torch.zeros(b - a, seen, dtype=q.dtype, device=q.device).masked_fill_(future, -torch.inf)
        out[:, :, a:b] = F.scaled_dot_product_attention(
            q[:, :, a:b], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale
        )
        del mask, future  # before the next ones are made
    return out


def watched_rows(last: int, heads: int, T: int) -> int:
    """Query rows per block of evidence about T tokens. Up to WATCHED rows in all come in one block."""
    return WATCHED if last <= WATCHED else min(max(EVIDENCE // (heads * T), 16), WATCHED)


def watch_prompt(q: Tensor, k: Tensor, last: int, scale: float, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, probabilities) for the last `last` of the S queries, `block` rows at a time.

    q [H, G, S, D]; k [H, T, D] in time order, the S new tokens last. The probabilities are
    float32 [H, G, C, K]: C query rows over the first K tokens; later tokens are in their future.
    """
    S, T = q.shape[2], k.shape[1]
    for a in range(max(S - last, 0), S, block):
        b = min(a + block, S)
        yield slice(a, b), _rows(q[:, :, a:b], k[:, : T - S + b], scale)


def _rows(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Attention of the last C of K tokens, q [H, G, C, D], k [H, K, D] -> [H, G, C, K]; temporaries end here."""
    H, G, C, D = q.shape
    logits = ((q.float() * scale).reshape(H, -1, D) @ k.float().mT).view(H, G, C, -1)
    future = torch.ones(C, C, dtype=torch.bool, device=q.device).triu_(1)
    logits[..., -C:].masked_fill_(future, -torch.inf)
    return torch.softmax(logits, -1, out=logits)  # in place: over a long text this is the largest thing there is


def attend_slots(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """What S queries find in the slots: q [H, G, S, D], mask [H, S, N] -> [H, G, S, D].

    Equal shares: k, v [H, N, D]. Ragged shares: the pool itself, k, v [R, D], and a mask [H, S, R]
    that also says which rows are the head's own: one product over all rows, then N is R. A slot
    outside the mask gets probability 0 exactly (and its V must be finite).
    """
    H, _, S, _ = q.shape
    if sweep.wanted_for_slots(q, k):
        return watch_slots(q, k, v, mask, scale)[0]
    k, v = ((x[:, None] if x.dim() == 3 else x).expand(H, S, -1, -1) for x in (k, v))  # views: the G heads are rows
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask[:, :, None], scale=scale).transpose(1, 2)


def watch_slots(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend_slots`, and how it came about: (answer, probabilities [H, G, S, N] in float32)."""
    H, G, S, D = q.shape
    if sweep.wanted_for_slots(q, k):
        logits = sweep.products(q.view(H, G, D), k) * scale + torch.where(mask, 0.0, -torch.inf)
        probs = logits.softmax(-1)
        return sweep.weighted(probs, v).to(v.dtype).view(H, G, S, D), probs.view(H, G, S, -1)
    unread = torch.where(mask, 0.0, -torch.inf).to(q.dtype)[:, None].expand(-1, G, -1, -1)  # added: 0, or no weight at all
    if k.dim() == 3:
        logits = torch.baddbmm(unread.flatten(1, 2), q.reshape(H, G * S, D), k.mT, alpha=scale)
    else:
        logits = torch.addmm(unread.flatten(0, 2), q.reshape(H * G * S, D), k.mT, alpha=scale)
    probs = logits.float().softmax(-1)
    return (probs.to(v.dtype) @ v).view(H, G, S, D), probs.view(H, G, S, -1)

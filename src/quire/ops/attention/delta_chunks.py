"""The gated delta rule over many tokens at once, by products of matrices.

Shape legend as in `states.py`, and C tokens of a chunk. With decays g, G[i] the product of those up
to token i, L[i, j] = G[i] / G[j], and M the memory before the chunk, what token i changes is k[i]
times

    w[i] = beta[i] (v[i] - G[i] M^T k[i] - sum over j < i of L[i, j] (k[i] . k[j]) w[j])

which is one triangular system for the chunk; results and the memory behind it are sums over w.
"""

import torch

CHUNK = 64


def remember_token(
    memory_NDE: torch.Tensor,
    q_ND: torch.Tensor,
    k_ND: torch.Tensor,
    v_NE: torch.Tensor,
    decay_N: torch.Tensor,
    beta_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what one token reads, [N, E], and the memory behind it."""
    memory_NDE = memory_NDE * decay_N[:, None, None]
    stored_NE = (k_ND[:, None] @ memory_NDE)[:, 0]
    change_NE = beta_N[:, None] * (v_NE - stored_NE)
    memory_NDE.baddbmm_(k_ND[:, :, None], change_NE[:, None])
    return (q_ND[:, None] @ memory_NDE)[:, 0], memory_NDE


def remember_tokens(
    memory_NDE: torch.Tensor,
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TNE: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what consecutive tokens read, [T, N, E], and the memory behind the last. log_decay is
    float64: large ones are subtracted from each other."""
    if len(q_TND) == 1:
        token = q_TND[0], k_TND[0], v_TNE[0], log_decay_TN[0].exp().to(v_TNE.dtype), beta_TN[0]
        out_NE, memory_NDE = remember_token(memory_NDE, *token)
        return out_NE[None], memory_NDE
    parts = []
    for chunk in zip(
        *(x.split(CHUNK) for x in (q_TND, k_TND, v_TNE, log_decay_TN, beta_TN)), strict=True
    ):
        out_NCE, memory_NDE = _remember_chunk(memory_NDE, *(x.transpose(0, 1) for x in chunk))
        parts.append(out_NCE.transpose(0, 1))
    return torch.cat(parts), memory_NDE


def _remember_chunk(
    memory_NDE: torch.Tensor,
    q_NCD: torch.Tensor,
    k_NCD: torch.Tensor,
    v_NCE: torch.Tensor,
    log_decay_NC: torch.Tensor,
    beta_NC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = v_NCE.dtype
    total_NC = log_decay_NC.cumsum(1)
    between_NCC = (total_NC[:, :, None] - total_NC[:, None]).tril().to(dtype).exp().tril()
    since_NC1, until_NC1 = (
        x.to(dtype).exp()[:, :, None] for x in (total_NC, total_NC[:, -1:] - total_NC)
    )
    kT_NDC = k_NCD.transpose(1, 2)
    system_NCC = beta_NC[:, :, None] * between_NCC * (k_NCD @ kT_NDC)
    asked_NCE = beta_NC[:, :, None] * (v_NCE - since_NC1 * (k_NCD @ memory_NDE))
    w_NCE = torch.linalg.solve_triangular(system_NCC, asked_NCE, upper=False, unitriangular=True)
    out_NCE = since_NC1 * (q_NCD @ memory_NDE) + (between_NCC * (q_NCD @ kT_NDC)) @ w_NCE
    return out_NCE, since_NC1[:, -1:] * memory_NDE + kT_NDC @ (until_NC1 * w_NCE)

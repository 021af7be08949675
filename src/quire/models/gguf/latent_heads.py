"""Join the weights that make keys and values of latent vectors, which GGUF files of `deepseek2`
hold apart. No torch.

In checkpoints one matrix has the rows of a head's key, then the rows of its value. Files hold the
keys' part transposed, so that queries can be multiplied with it. quire never keeps either part
quantised, so the joined matrix is float32.

Shape legend: N heads, P dimensions of a head's key without rotation, V of its value, R rank.
"""

import re

import numpy as np
import numpy.typing as npt

from quire.base.errors import ModelError
from quire.models.gguf.dequantise import dequantise
from quire.spec.gguf.container import GGUFFile, TensorEntry

KEYS = re.compile(r"(blk\.\d+\.)attn_k_b\.weight")
VALUES = re.compile(r"(blk\.\d+\.)attn_v_b\.weight")


def joined_heads(file: GGUFFile, keys: TensorEntry) -> npt.NDArray[np.float32]:
    """Return a layer's matrix as checkpoints have it, [N (P + V), R]. keys: entry of the keys' part
    [N, R, P]. Raises ModelError without the values' part [N, V, R]."""
    name = keys.name.replace("attn_k_b", "attn_v_b")
    values = file.tensors.get(name)
    if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
        raise ModelError(f"{file.path}: {keys.name} needs {name}, both with a matrix per head.")
    keys_NRP, values_NVR = _dense(file, keys), _dense(file, values)
    if len(keys_NRP) != len(values_NVR) or keys_NRP.shape[1] != values_NVR.shape[2]:
        raise ModelError(f"{file.path}: {keys.name} and {name} differ in heads or rank.")
    both = np.concatenate((keys_NRP.swapaxes(1, 2), values_NVR), axis=1)
    return both.reshape(-1, both.shape[2])


def _dense(file: GGUFFile, place: TensorEntry) -> npt.NDArray[np.float32]:
    stored = np.frombuffer(file.data(place), np.uint8)
    rows = dequantise(place.kind, stored.reshape(place.shape[0] * place.shape[1], -1))
    file.forget(place)
    return rows.reshape(place.shape)

"""The choice among several GGUF files: names of quantisations, quality, sizes, split models."""

import pytest

from quire.base.errors import ModelError, ModelNotFound
from quire.models.library.gguf_choice import (
    best_choice,
    candidates_of,
    in_units,
    machine_memory_bytes,
    named_choice,
    quantisation_of,
)

GB = 10**9
# Sizes of the files of an 8B model.
SIZES = {
    "m-BF16.gguf": 16.1,
    "m-Q8_0.gguf": 8.5,
    "m-Q6_K.gguf": 6.6,
    "m-Q5_K_M.gguf": 5.7,
    "m-Q4_K_S.gguf": 4.7,
    "m-Q4_K_M.gguf": 4.9,
    "m-Q3_K_L.gguf": 4.3,
    "m-Q2_K.gguf": 3.2,
}
FILES = {name: int(size * GB) for name, size in SIZES.items()}


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q8_0.gguf", "Q8_0"),
        ("gemma-3-1b-it-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("model.IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("sub/Model-BF16.gguf", "BF16"),
        ("F16-model-F32.gguf", "F32"),
        ("Q4you.gguf", ""),
        ("model.gguf", ""),
    ],
)
def test_file_names_give_the_quantisation(name: str, quantisation: str) -> None:
    assert quantisation_of(name) == quantisation


def test_candidates_are_model_files_in_order_of_quality() -> None:
    files = FILES | {"mmproj-m-F16.gguf": 1, "imatrix.gguf": 1, "README.md": 1}
    assert [each.label for each in candidates_of(files)] == [
        "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K_S", "Q3_K_L", "Q2_K",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "label"),
    [(128, "Q8_0"), (27, "Q6_K"), (24, "Q5_K_M"), (16, "Q4_K_M"), (7.1, "Q4_K_M"), (6.9, "Q4_K_S"),
     (6.3, "Q3_K_L"), (5, "Q2_K")],
)  # fmt: skip
def test_the_best_choice_depends_on_the_memory(memory: float, label: str) -> None:
    choice = best_choice(candidates_of(FILES), int(memory * GB), "org/m")
    assert choice.candidate.label == label
    assert choice.reason.startswith(f"{label} (") and "memory" in choice.reason


def test_the_smallest_file_is_chosen_if_all_are_large() -> None:
    files = {name: FILES[name] for name in ("m-BF16.gguf", "m-Q8_0.gguf")}
    choice = best_choice(candidates_of(files), 16 * GB, "org/m")
    assert choice.candidate.label == "Q8_0" and "the smallest of 2 files" in choice.reason


def test_no_fitting_or_readable_file_is_an_error() -> None:
    with pytest.raises(ModelError, match="the smallest, Q2_K, needs 3.2 GB.* append :Q2_K"):
        best_choice(candidates_of(FILES), 4 * GB, "org/m")
    with pytest.raises(ModelError, match="no GGUF file that quire reads; it has Q1_0"):
        best_choice(candidates_of({"m-Q1_0.gguf": 9}), GB, "org/m")
    with pytest.raises(ModelError, match="it has none"):
        best_choice([], GB, "org/m")


def test_formats_that_grow_when_loaded_count_with_their_loaded_size() -> None:
    """IQ3_M would fit with its bytes in the file, but takes 9 bits per weight once loaded."""
    files = {"m-IQ3_M.gguf": 4 * GB, "m-Q2_K.gguf": 5 * GB}
    [first, second] = candidates_of(files)
    assert first.memory_bytes > 10 * GB and second.memory_bytes == 5 * GB
    assert best_choice([first, second], 10 * GB, "org/m").candidate.label == "Q2_K"
    assert best_choice([first, second], 32 * GB, "org/m").candidate.label == "IQ3_M"


def test_split_models_need_all_parts() -> None:
    files = {f"Q8_0/m-Q8_0-0000{n}-of-00003.gguf": 10 for n in (1, 3, 2)}
    [each] = candidates_of(files)
    assert (each.label, each.num_bytes, len(each.files)) == ("Q8_0", 30, 3)
    assert [*each.files] == sorted(files)
    del files["Q8_0/m-Q8_0-00002-of-00003.gguf"]
    assert candidates_of(files) == []


def test_a_file_is_chosen_by_name() -> None:
    candidates = candidates_of(FILES)
    assert named_choice(candidates, "q4_k_m", "org/m").candidate.files == ("m-Q4_K_M.gguf",)
    assert named_choice(candidates, "m-Q2_K.gguf", "org/m").candidate.label == "Q2_K"
    with pytest.raises(ModelNotFound, match="org/m has no GGUF file 'Q9'; it has BF16 "):
        named_choice(candidates, "Q9", "org/m")


def test_sizes_have_units_and_the_memory_is_known() -> None:
    assert [in_units(n) for n in (999, 1500, 2 * 10**6, 5 * GB)] == [
        "999 bytes", "1.5 kB", "2.0 MB", "5.0 GB",
    ]  # fmt: skip
    assert machine_memory_bytes() > 1 << 20

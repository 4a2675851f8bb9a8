"""Other projects' kernels: what is missing, and how each is called."""

from __future__ import annotations

import contextlib
import functools
import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_data import short_chains as short_chains  # a fixture for all

from eval.bench import baselines
from eval.bench.bench_cases import Cell, make_chain
from eval.bench.bench_report import BASELINES


class TestBaselines:
    def test_missing_files_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        found = baselines.available(tmp_path)
        assert set(found) == set(BASELINES)
        assert not found["torch"].why_not
        assert "libtrtllm_kernel.so" in found["trtllm"].why_not
        assert "_C_stable_libtorch.abi3.so" in found["vllm"].why_not

    def test_compressed_file_is_unpacked_where_no_other_user_can_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setattr(baselines, "_own_folder", functools.cache(baselines._own_folder.__wrapped__))
        (tmp_path / "in" / "deep").mkdir(parents=True)
        (tmp_path / "in" / "deep" / "some.so.xz").write_bytes(lzma.compress(b"content"))
        found = baselines.find_file(tmp_path / "in", "some.so")
        assert found.read_bytes() == b"content" and found == baselines.find_file(tmp_path / "in", "some.so")
        assert (tmp_path / "in") not in found.parents
        assert found.parent.stat().st_mode & 0o777 == 0o700
        assert baselines._own_folder.__wrapped__() != found.parent  # a name that nobody knows beforehand

    @pytest.mark.parametrize("batch", [2, 65])
    def test_operators_get_the_arguments_of_their_projects(
        self, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[str, tuple[Any, ...]]] = []

        class Operators:
            def __getattr__(self, name: str) -> Any:
                return SimpleNamespace(default=lambda *arguments: calls.append((name, arguments)))

        monkeypatch.setattr(torch, "ops", SimpleNamespace(_C=Operators(), trtllm=Operators()))
        monkeypatch.setattr(baselines, "load_library", lambda folder, name: None)
        chain = make_chain(Cell("main", 300, batch, 16), device="cpu")
        for name in ("trtllm", "vllm", "trtllm_prefill", "vllm_prefill"):
            prepared = baselines.LOADED[name][2](tmp_path)(chain)
            prepared.launch(3)
            called, arguments = calls.pop()
            row, lengths, out = chain.logits[3], chain.lengths, prepared.results[3]
            starts = torch.zeros(batch, dtype=torch.int32)
            wanted: dict[str, tuple[Any, ...]] = {
                "trtllm": ("indexer_topk_decode", row, lengths, out, 1, 16),
                "vllm": (
                    *("cooperative_topk" if batch <= 64 else "persistent_topk", row, lengths, out),
                    *(torch.zeros(1 << 20, dtype=torch.uint8), 16, 304),
                ),
                "trtllm_prefill": ("indexer_topk_prefill", row, starts, lengths, out, 16),
                "vllm_prefill": ("top_k_per_row_prefill", row, starts, lengths, out, batch, 304, 1, 16),
            }
            for got, expected in zip((called, *arguments), wanted[name], strict=True):
                if isinstance(expected, torch.Tensor):
                    assert got.shape == expected.shape and torch.equal(
                        got.nan_to_num(), expected.nan_to_num()
                    )
                else:
                    assert got == expected
            assert (
                arguments[3 if "per_row" in called or "prefill" in called else 2].data_ptr() == out.data_ptr()
            )

    def test_deterministic_calls_of_flashinfer_never_take_cub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, tuple[Any, ...]]] = []

        class Module:
            def __getattr__(self, name: str) -> Any:
                return lambda *arguments: calls.append((name, arguments)) or 16

        monkeypatch.setattr(baselines, "ffi_module", lambda folder, name: (None, Module()))
        monkeypatch.setattr(baselines, "on_stream", lambda ffi, function: function)
        chain = make_chain(Cell("main", 32768, 1, 16), device="cpu")
        for deterministic in (False, True):
            baselines._flashinfer_ragged(Path(), deterministic=deterministic)(chain).launch(0)
        (_, (sized, _), (name, arguments)) = calls[0], calls[1], calls[2]
        assert sized == "cub_topk_ragged_transform" and len(calls) == 3
        assert name == "radix_topk_ragged_transform"
        assert arguments[5:] == (16, True, baselines.FLASHINFER_SMALL_TIES, False, None)

    def test_cudnn_takes_the_kernel_of_the_next_power_of_two(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[str, tuple[Any, ...]]] = []

        class Module:
            def __getitem__(self, name: str) -> Any:
                if not name.endswith("_16"):
                    raise AttributeError(name)
                return lambda *arguments: calls.append((name, arguments))

        class Bindings:
            load_module = staticmethod(lambda path: Module())
            device = staticmethod(lambda name: name)
            use_raw_stream = staticmethod(lambda device, stream: contextlib.nullcontext())

        (tmp_path / "cudnn_topk.so").write_bytes(b"")
        monkeypatch.setattr(baselines, "_import_from", lambda name, folder: Bindings)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        prepare = baselines._cudnn(tmp_path)
        chain = make_chain(Cell("main", 5000, 2, 16), device="cpu")
        prepared = prepare(chain)
        prepared.launch(3)
        ((name, arguments),) = calls
        assert name == "indexer_topk_8192_16"
        assert arguments[0].data_ptr() == chain.logits[3].data_ptr()
        assert arguments[5].data_ptr() == prepared.results[3].data_ptr()
        assert arguments[2].shape == (2, 2, chain.logits.shape[2])
        with pytest.raises(baselines.BaselineError, match="compiled for other columns and k"):
            prepare(make_chain(Cell("main", 5000, 2, 8), device="cpu"))
        with pytest.raises(baselines.BaselineError, match="at most 148 rows, got 149"):
            prepare(make_chain(Cell("main", 64, 149, 16), device="cpu"))

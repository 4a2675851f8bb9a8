"""Other projects' kernels: what is missing, and where a compressed one is unpacked."""

import functools
import lzma
from pathlib import Path

import pytest
import torch

from eval.bench import baselines
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

"""``python -m eval flashmla`` with attention of its own in place of FlashMLA's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from eval import flashmla_order
from eval.__main__ import main
from eval.flashmla_order import BLOCK, NOPE, ROPE, SCALE, Cache, Case


class Kernels:
    """Attention whose fp32 sums are made in the order of the ids, with the interface of vLLM 0.33."""

    def __init__(self, sort: bool = False) -> None:
        self._sort = sort
        self.calls: list[str] = []

    def get_mla_metadata(self) -> tuple[SimpleNamespace, None]:
        return SimpleNamespace(), None

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v=512):
        self.calls.append("bf16")
        assert q.dtype == kv.dtype == torch.bfloat16 and kv.shape[1:] == (1, NOPE + ROPE)
        output, sums = self._attend(q, kv[:, 0].float(), indices[:, 0], sm_scale, d_v)
        return output, sums.clone(), sums

    def flash_mla_with_kvcache(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        softmax_scale,
        is_fp8_kvcache,
        indices,
    ):
        self.calls.append("fp8")
        assert is_fp8_kvcache and k_cache.dtype == torch.uint8 and k_cache.shape[1:] == (BLOCK, 1, 656)
        assert tile_scheduler_metadata is not None and len(cache_seqlens) == len(block_table) == len(q)
        rows = k_cache.reshape(-1, 656)
        scales = rows[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, dim=1)
        values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float() * scales
        keys = torch.cat([values, rows[:, 528:].contiguous().view(torch.bfloat16).float()], dim=1)
        output, sums = self._attend(q[:, 0], keys, indices[:, 0], softmax_scale, head_dim_v)
        return output.unsqueeze(1), sums.unsqueeze(2)

    def _attend(self, q, keys, ids, scale, width):
        outputs, sums = [], []
        for query, row in zip(q.float(), ids.long(), strict=True):
            chosen = keys[row.sort().values if self._sort else row]
            scores = query @ chosen.T * scale
            total = torch.zeros(len(query), width)
            weights = scores.softmax(-1)
            for part in range(0, len(row), 7):
                total = total + weights[:, part : part + 7] @ chosen[part : part + 7, :width]
            outputs.append(total)  # fp32, so that the order shows
            sums.append(scores.logsumexp(-1))
        return torch.stack(outputs), torch.stack(sums)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(flashmla_order, "TOPK", 40)
    monkeypatch.setattr(flashmla_order.importlib.metadata, "version", lambda name: "0.33.0")


def options(tmp_path, *more):
    given = ["--out", str(tmp_path / "order.json"), "--batches", "1,2", "--contexts", "128", "--heads", "3"]
    return flashmla_order.parse_args([*given, "--shuffles", "4", "--repeats", "3", *more])


@pytest.mark.parametrize("sort", [False, True])
def test_report(tmp_path, sort):
    kernels = Kernels(sort)
    assert flashmla_order.run(kernels, options(tmp_path), "cpu") == 0
    report = json.loads((tmp_path / "order.json").read_text())
    assert report["format"] == "gvr_topk.flashmla_order/1" and report["versions"] == {"vllm": "0.33.0"}
    assert report["machine"]["commit"] and report["failures"] == []
    names = [(case["batch"], case["kernel"], case["selection"]) for case in report["cases"]]
    assert names == [(b, k, s) for b in (1, 2) for k in ("fp8", "bf16") for s in ("uniform", "recent")]
    for case in report["cases"]:
        assert 0 < case["error"] < 1e-4
        outputs = case["outputs"]
        assert (outputs["ascending_runs"], outputs["ascending_distinct"]) == (5, 1)
        assert outputs["one_shuffle_again_distinct"] == 1
        assert outputs["shuffles_equal_to_ascending"] == (4 if sort else 0)
        assert (outputs["shuffles_distinct"] == 1) is sort
        assert (outputs["largest_difference"] == 0) is sort
        assert set(case["us"]) == {"ascending", "shuffled"} and min(case["us"]["shuffled"].values()) > 0
        assert set(case["shuffled_over_ascending"]) == {"cold", "warm"}


def test_kernels_that_fail_or_are_wrong(tmp_path, capsys):
    """Each is a failure in the result, and the other kernel is measured all the same."""
    kernels = Kernels()
    kernels.flash_mla_sparse_fwd = None
    assert flashmla_order.run(kernels, options(tmp_path, "--selections", "uniform"), "cpu") == 3
    report = json.loads((tmp_path / "order.json").read_text())
    assert [case["kernel"] for case in report["cases"]] == ["fp8", "fp8"]
    assert report["failures"][0].startswith("bf16 1 x 128, 3 heads, uniform: TypeError")
    wrong = Kernels()
    wrong._attend = lambda q, keys, ids, *rest: (
        torch.full((len(q), 3, 512), float("nan")),
        q[..., 0].float(),
    )
    assert flashmla_order.run(wrong, options(tmp_path, "--kernels", "bf16"), "cpu") == 3
    report = json.loads((tmp_path / "order.json").read_text())
    assert report["cases"] == [] and "wanted within 0.01 of attention in fp32" in report["failures"][0]
    assert flashmla_order.run(kernels, options(tmp_path, "--seconds", "0"), "cpu") == 3
    assert "TimeoutError: left out" in capsys.readouterr().out


@pytest.mark.parametrize("kernel", ["fp8", "bf16"])
def test_cache(kernel):
    """What a kernel reads is what the comparison in fp32 reads."""
    cache = Cache(Case(kernel, 2, 64, 3, "uniform"), "cpu")
    drawn = torch.randn((128, NOPE + ROPE), generator=torch.Generator().manual_seed(0))
    assert cache.memory.shape == (128, 656 if kernel == "fp8" else 576)
    keys = cache.keys(torch.arange(128))
    assert (keys - drawn).abs().max() < (0.3 if kernel == "fp8" else 0.02)
    assert SCALE == 576**-0.5


def test_selections():
    for selection in ("uniform", "recent"):
        case = Case("fp8", 3, 128, 1, selection)
        ids = flashmla_order.ascending_ids(case, "cpu")
        assert ids.dtype == torch.int32 and ids.shape == (3, 40)
        assert (ids.diff(dim=1) > 0).all()
        assert (ids // 128 == torch.arange(3)[:, None]).all()
        recent = (ids % 128 >= 128 - 20).sum(1)
        assert (recent == 20).all() if selection == "recent" else (recent < 15).all()
        orders = flashmla_order.shuffles(ids, 5)
        assert all(torch.equal(order.sort(1).values, ids) for order in orders)
        assert len({tuple(order.flatten().tolist()) for order in orders}) == 5


def test_missing(monkeypatch, capsys):
    assert main(["flashmla"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["flashmla"]) == 2
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert said.out == "" and first == "flashmla: GPU: wanted a CUDA GPU, got none"
    assert second.startswith("flashmla: wanted vllm.v1.attention.ops.flashmla, got ModuleNotFoundError")
    module = SimpleNamespace(is_flashmla_sparse_supported=lambda: (False, "only on Hopper"))
    monkeypatch.setattr(flashmla_order.importlib, "import_module", lambda name: module)
    with pytest.raises(flashmla_order.MissingError, match="got none: only on Hopper"):
        flashmla_order.load()
    module.is_flashmla_sparse_supported = lambda: (True, None)
    assert flashmla_order.load() is module


@pytest.mark.parametrize(
    "wrong", [["--contexts", "100"], ["--kernels", "fp4"], ["--batches", "0"], ["--shuffles", "0"]]
)
def test_wrong_options(wrong, capsys):
    assert main(["flashmla", *wrong]) == 2
    assert "wanted" in capsys.readouterr().err

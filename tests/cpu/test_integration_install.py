"""Loading, patching, refusing and restoring; the YAML key; what other processes pay."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))

from engine import DSA, LLM_ARGS, SHAPES, fake_package, load_dsa, load_llm_args

import gvr_topk_autoload
from gvr_topk.integrations import environment, patch_points
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations.layer_hook import DecodeOp
from gvr_topk.integrations.transaction import Transaction

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "fakes"
VARIABLES = ("GVR_TOPK_DISABLE", "TRTLLM_GVR_TOPK", "TRTLLM_GVR_TOPK_OPTIONS", "TRTLLM_GVR_TOPK_METRICS_DIR")
YAML = """
sparse_attention_config:
  algorithm: dsa
  enable_heuristic_topk: true
gvr_topk:
  stats: true
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    integration.uninstall()


@pytest.fixture(params=SHAPES)
def shape(request):
    with fake_package(request.param):
        yield request.param


def parse(text: str):
    """Read a YAML file the way ``--config`` and ``--extra_llm_api_options`` are read."""
    llm_args = load_llm_args()
    arguments = llm_args.update_llm_args_with_extra_dict({"model": "m"}, yaml.safe_load(text))
    return llm_args.TorchLlmArgs(**arguments)


def picture(dsa, llm_args) -> dict[str, object]:
    """Everything the integration may change."""
    return {
        "call": dsa.Indexer.sparse_attn_indexer,
        "prepare": dsa.DSAtrtllmAttentionMetadata.prepare,
        "op": torch.ops.trtllm.indexer_topk_decode,
        "fields": {
            m: dict(getattr(llm_args, m).model_fields)
            for m in ("DeepSeekSparseAttentionConfig", "TorchLlmArgs")
        },
        "classes": {
            m: set(vars(getattr(llm_args, m))) for m in ("DeepSeekSparseAttentionConfig", "TorchLlmArgs")
        },
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "finders": list(sys.meta_path),
    }


def warnings() -> list[str]:
    logger = sys.modules["tensorrt_llm.logger"].logger
    return [line for level, line in logger.lines if level == "warning"]


@pytest.mark.parametrize("late", [False, True], ids=["hook first", "modules first"])
def test_the_yaml_key_is_accepted_and_reaches_the_environment(shape, late):
    if late:  # as from --custom_module_dirs
        load_llm_args()
        load_dsa()
    assert integration.install()
    args = parse(YAML)
    assert args.sparse_attention_config.enable_heuristic_topk is True
    assert os.environ["TRTLLM_GVR_TOPK"] == "1"
    assert json.loads(os.environ["TRTLLM_GVR_TOPK_OPTIONS"])["stats"] is True
    assert environment.options().stats and environment.mode() is environment.Mode.ON


def test_a_plain_install_changes_nothing_in_the_environment(shape):
    assert integration.install()
    parse("sparse_attention_config: {algorithm: dsa}\n")
    assert not any(name in os.environ for name in VARIABLES)


def test_a_custom_module_directory_is_enough(shape):
    """``--custom_module_dirs``: the folder is imported as a package of its own name."""
    load_llm_args()
    sys.path.append(str(ROOT / "gvr_topk" / "integrations" / "custom_module"))
    try:
        importlib.import_module("gvr_topk_enable")
    finally:
        sys.path.pop()
    del sys.modules["gvr_topk_enable"]
    assert parse(YAML).sparse_attention_config.enable_heuristic_topk


def test_without_us_1_2_rejects_the_key_and_1_3_takes_it(shape):
    if shape == "trtllm_1_2":
        with pytest.raises(ValidationError, match="enable_heuristic_topk"):
            parse(YAML.split("gvr_topk:")[0])
    else:
        assert parse(YAML.split("gvr_topk:")[0]).sparse_attention_config.enable_heuristic_topk
        assert "TRTLLM_GVR_TOPK" not in os.environ


def test_other_keys_are_still_rejected(shape):
    integration.install()
    with pytest.raises(ValidationError, match="enable_heuristic_topkk"):
        parse(YAML.replace("enable_heuristic_topk:", "enable_heuristic_topkk:"))
    with pytest.raises(ValidationError, match="statss"):
        parse(YAML.replace("stats", "statss"))


def test_their_field_keeps_its_definition():
    with fake_package("trtllm_1_3"):
        theirs = load_llm_args().DeepSeekSparseAttentionConfig.model_fields["enable_heuristic_topk"]
        integration.install()
        ours = load_llm_args().DeepSeekSparseAttentionConfig.model_fields["enable_heuristic_topk"]
        assert (ours.annotation, ours.default, ours.description) == (bool, False, theirs.description)
        assert load_llm_args().DeepSeekSparseAttentionConfig().enable_heuristic_topk is False


def test_an_explicit_false_takes_our_value_back(shape):
    integration.install()
    parse(YAML)
    parse(YAML.replace("true", "false", 1))
    assert "TRTLLM_GVR_TOPK" not in os.environ


@pytest.mark.parametrize("value", ["0", "force"])
def test_the_users_variable_overrules_the_yaml(shape, monkeypatch, value):
    monkeypatch.setenv("TRTLLM_GVR_TOPK", value)
    integration.install()
    parse(YAML)
    assert os.environ["TRTLLM_GVR_TOPK"] == value
    parse(YAML.replace("true", "false", 1))
    assert os.environ["TRTLLM_GVR_TOPK"] == value


def test_a_worker_started_earlier_learns_it_from_the_arguments(shape):
    """Workers of an external MPI launch run before the YAML is read: no variable reaches them."""
    integration.install()
    sent = pickle.dumps(parse(YAML))
    environment.withdraw_all()
    assert "TRTLLM_GVR_TOPK" not in os.environ
    received = pickle.loads(sent)
    assert received.sparse_attention_config.enable_heuristic_topk is True
    assert os.environ["TRTLLM_GVR_TOPK"] == "1"
    assert environment.options().stats


def test_patched_once_however_often(shape):
    dsa = load_dsa()
    assert integration.install() and integration.installed()
    first = picture(dsa, load_llm_args())
    assert integration.install()
    integration.module_loaded(DSA)
    integration.module_loaded(LLM_ARGS)
    assert picture(dsa, load_llm_args()) == first
    assert dsa.Indexer.sparse_attn_indexer.__wrapped__.__module__.startswith("tensorrt_llm")


def test_uninstall_restores_everything(shape):
    dsa, llm_args = load_dsa(), load_llm_args()
    before = picture(dsa, llm_args)
    integration.install()
    changed = picture(dsa, llm_args)
    assert all(changed[name] != before[name] for name in ("call", "prepare", "op", "fields", "finders"))
    parse(YAML)
    integration.uninstall()
    assert picture(dsa, llm_args) == before
    if shape == "trtllm_1_2":
        with pytest.raises(ValidationError):
            parse(YAML)
    assert integration.install()  # and again
    parse(YAML)


@pytest.mark.parametrize("nth", range(7))
def test_a_failure_in_the_middle_restores_everything(shape, monkeypatch, nth):
    dsa, llm_args = load_dsa(), load_llm_args()
    before = picture(dsa, llm_args)
    count = 0

    def failing(change):
        def wrapper(self, *args):
            nonlocal count
            count += 1
            if count == nth + 1:
                raise OSError("forced")
            change(self, *args)

        return wrapper

    for name in ("set_attribute", "set_item"):
        monkeypatch.setattr(Transaction, name, failing(getattr(Transaction, name)))
    assert not integration.install() and count == nth + 1
    gvr_topk_autoload.uninstall()
    assert picture(dsa, llm_args) == before
    (line,) = warnings()
    assert "refused" in line and "OSError: forced" in line
    if shape == "trtllm_1_2":
        with pytest.raises(ValidationError):
            parse(YAML)


def edited(tmp_path: Path, shape: str, file: str, old: str, new: str) -> Path:
    root = tmp_path / shape
    shutil.copytree(FAKES / shape, root)
    source = root / "tensorrt_llm" / file
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))
    return root


SPARSE = "_torch/attention_backend/sparse/"
EDITS = [
    (
        "trtllm_1_2",
        SPARSE + "dsa.py",
        "hidden_states: torch.Tensor,",
        "x: torch.Tensor,",
        "Indexer.sparse_attn_indexer",
    ),
    (
        "trtllm_1_2",
        SPARSE + "dsa.py",
        "use_custom_topk: bool = True",
        "use_custom_topk: bool = True, *, extra",
        "Indexer.sparse_attn_indexer",
    ),
    ("trtllm_1_2", SPARSE + "dsa.py", "class Indexer(", "class Selector(", "Indexer.__init__"),
    ("trtllm_1_2", SPARSE + "dsa.py", "layer_idx=0", "layer=0, layer_idx_=0", "Indexer.__init__"),
    (
        "trtllm_1_3",
        SPARSE + "dsa/metadata.py",
        "def prepare(self):",
        "def prepare(self, batch):",
        "DSAtrtllmAttentionMetadata.prepare",
    ),
    (
        "trtllm_1_3",
        SPARSE + "dsa/cache_manager.py",
        "get_indexer_k_cache_buffers",
        "get_k",
        "DSACacheManager.get_indexer_k_cache_buffers",
    ),
    (
        "trtllm_1_2",
        "__init__.py",
        "indexer_topk_decode(Tensor logits",
        "indexer_topk_decode(Tensor scores",
        "torch.ops.trtllm.indexer_topk_decode",
    ),
    (
        "trtllm_1_2",
        "llmapi/llm_args.py",
        "class DeepSeekSparseAttentionConfig",
        "class DsaConfig",
        "DeepSeekSparseAttentionConfig",
    ),
]


@pytest.mark.parametrize(
    "shape, file, old, new, point", EDITS, ids=[f"{e[4]}-{i}" for i, e in enumerate(EDITS)]
)
def test_another_signature_is_refused_with_one_message(tmp_path, shape, file, old, new, point):
    root = edited(tmp_path, shape, file, old, new)
    if "class DeepSeek" in old:
        file = root / "tensorrt_llm" / file
        file.write_text(
            file.read_text()
            .replace("DeepSeekSparseAttentionConfig]", "DsaConfig]")
            .replace("(DeepSeekSparse", "(Dsa")
        )
    with fake_package(shape, root=root):
        gvr_topk_autoload.install()
        import tensorrt_llm.logger  # noqa: F401

        llm_args = load_llm_args()
        dsa = load_dsa()
        assert not integration.installed()
        assert not isinstance(torch.ops.trtllm.indexer_topk_decode, DecodeOp)
        assert "enable_heuristic_topk" not in vars(llm_args.TorchLlmArgs).get("__annotations__", {})
        assert not hasattr(getattr(dsa, "Indexer", dsa), "__wrapped__")
        (line,) = warnings()
        version = "1.2.1" if shape == "trtllm_1_2" else "1.3.0rc22"
        assert version in line and point in line and "wanted" in line and "got" in line
        assert "Nothing was changed" in line and "GVR_TOPK_DISABLE=1" in line
        state = dict(integration.describe())
        assert state["would happen"].startswith("refused: ")
        if point != "torch.ops.trtllm.indexer_topk_decode":
            assert state[point].startswith(("missing", "mismatch"))


def test_an_op_that_does_not_fit_undoes_the_configuration_too(tmp_path):
    """The op is only known once its library is loaded: the config was patched by then."""
    root = edited(tmp_path, "trtllm_1_2", "__init__.py", "int next_n, ", "int rows, ")
    with fake_package("trtllm_1_2", root=root):
        gvr_topk_autoload.install()
        llm_args = load_llm_args()
        assert "enable_heuristic_topk" in llm_args.DeepSeekSparseAttentionConfig.model_fields
        load_dsa()
        assert "enable_heuristic_topk" not in llm_args.DeepSeekSparseAttentionConfig.model_fields
        with pytest.raises(ValidationError):
            parse(YAML)


def test_switched_off(shape, monkeypatch):
    monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
    dsa, llm_args = load_dsa(), load_llm_args()
    before = picture(dsa, llm_args)
    assert integration.install() is False
    integration.module_loaded(DSA)
    assert picture(dsa, llm_args) == before
    assert dict(integration.describe())["would happen"] == "nothing: GVR_TOPK_DISABLE is set"


def test_a_wrong_value_of_the_variable_is_named(shape, monkeypatch):
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "yes")
    with pytest.raises(ValueError, match=r"TRTLLM_GVR_TOPK: wanted 0, 1 or force, got 'yes'"):
        environment.mode()
    assert "TRTLLM_GVR_TOPK: wanted" in dict(integration.describe())["would happen"]


def test_describe_imports_nothing(shape):
    rows = dict(integration.describe())
    assert "tensorrt_llm" not in sys.modules
    assert rows["TensorRT-LLM"].startswith("1.2.1 in " if shape == "trtllm_1_2" else "1.3.0rc22 in ")
    for point in patch_points.TABLE:
        assert rows[point.name].startswith(("ok: ", "later ("))
    assert rows["would happen"] == (
        "on where the YAML has sparse_attention_config.enable_heuristic_topk: true, after install()"
    )
    gvr_topk_autoload.install()
    assert dict(integration.describe())["import hook"] == "active"


def test_describe_without_the_engine():
    assert integration.describe()[0] == ("TensorRT-LLM", "not installed")


def python(code: str, **variables: str) -> str:
    """Run code in a fresh process that starts as an environment with the ``.pth`` file would."""
    pth = (ROOT / "packaging" / "gvr_topk_autoload.pth").read_text()
    command = [sys.executable, "-S", "-c", f"{pth}\n{code}"]
    search = os.pathsep.join([str(ROOT), str(FAKES), str(FAKES / "trtllm_1_2"), *sys.path])
    environ = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    done = subprocess.run(
        command,
        env={**environ, "PYTHONPATH": search, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_other_processes_import_nothing():
    loaded = python("import sys; print(*sorted(sys.modules))").split()
    assert "gvr_topk_autoload" in loaded
    heavy = {name.split(".")[0] for name in loaded} & {
        "torch",
        "gvr_topk",
        "pydantic",
        "numpy",
        "importlib",
        "typing",
    }
    assert heavy <= {"importlib"} and not any(name.startswith("gvr_topk.") for name in loaded)
    bare = subprocess.run(
        [sys.executable, "-S", "-c", "import os, sys; print(*sorted(sys.modules))"],
        capture_output=True,
        text=True,
    )
    assert set(loaded) - set(bare.stdout.split()) <= {"gvr_topk_autoload", "__future__"}


PTH = ROOT / "packaging" / "gvr_topk_autoload.pth"


def site_start(folder: Path, code: str, before: str = "pass", **variables: str) -> tuple[str, str]:
    """Output and errors of a Python whose site folder is `folder`, with `before` run ahead of it."""
    program = f"import site, sys; {before}; site.addsitedir({str(folder)!r}); {code}"
    environ = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program],
        env={**environ, **variables},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip(), done.stderr


@pytest.fixture
def site_folder(tmp_path):
    shutil.copy(PTH, tmp_path)
    shutil.copy(ROOT / "gvr_topk_autoload.py", tmp_path)
    return tmp_path


FIRST = "print(getattr(sys.meta_path[0], '__module__', ''))"


def test_the_pth_file_is_one_line():
    (line,) = PTH.read_text().splitlines()
    assert line.startswith("import ")


@pytest.mark.parametrize("value", [None, "", "0", "false", "False", "NO", "off", " 0 "])
def test_site_runs_the_pth_file(site_folder, value):
    variables = {} if value is None else {"GVR_TOPK_DISABLE": value}
    assert site_start(site_folder, FIRST, **variables) == ("gvr_topk_autoload", "")


@pytest.mark.parametrize("value", ["1", "true", "yes", "2"])
def test_it_can_be_switched_off(site_folder, value, monkeypatch):
    assert site_start(site_folder, FIRST, GVR_TOPK_DISABLE=value) == ("_frozen_importlib", "")
    monkeypatch.setenv("GVR_TOPK_DISABLE", value)
    assert environment.disabled() and gvr_topk_autoload.disabled()


def test_half_an_uninstall_is_silent(site_folder):
    """Pip removes the module and leaves the .pth file, or somebody deletes one of them by hand."""
    (site_folder / "gvr_topk_autoload.py").unlink()
    assert site_start(site_folder, FIRST) == ("_frozen_importlib", "")


def test_slow_finders_are_not_asked_and_keep_their_place(site_folder):
    """As an editable install has one: its finder imports importlib.util when it is asked for our module."""
    finder = (
        "Slow = type('Slow', (), {'find_spec': lambda self, name, path=None, target=None: "
        "asked.append(name)}); asked = []; sys.meta_path.insert(0, Slow())"
    )
    code = (
        "print('gvr_topk_autoload' in asked, [type(f).__name__ for f in sys.meta_path][1], sys.meta_path[0])"
    )
    out, errors = site_start(site_folder, code, finder)
    assert (out, errors) == ("False Slow <class 'gvr_topk_autoload.Finder'>", "")
    code = "print('importlib.util' in sys.modules)"
    assert site_start(site_folder, code) == ("False", "")


def test_a_module_that_only_a_finder_knows_is_found_through_it(site_folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (site_folder / "gvr_topk_autoload.py").rename(elsewhere / "gvr_topk_autoload.py")
    finder = (
        "import importlib.machinery as m; find = m.PathFinder.find_spec; "
        f"Editable = type('Editable', (), {{'find_spec': lambda self, name, path=None, target=None: "
        f"find(name, [{str(elsewhere)!r}]) if name == 'gvr_topk_autoload' else None}}); "
        "sys.meta_path.insert(0, Editable())"
    )
    assert site_start(site_folder, FIRST, finder) == ("gvr_topk_autoload", "")


def test_a_worker_process_is_patched_on_import_and_asks_its_environment():
    code = """
import sys
import tensorrt_llm._torch.attention_backend.sparse.dsa
from gvr_topk.integrations import environment, tensorrt_llm as integration
print(integration.installed(), environment.mode().name, environment.options().stats)
"""
    assert python(code, TRTLLM_GVR_TOPK="1", TRTLLM_GVR_TOPK_OPTIONS='{"stats": true}').split() == [
        "True",
        "ON",
        "True",
    ]
    assert python(code).split() == ["True", "OFF", "False"]


def test_parent_to_worker_through_the_environment():
    """The variables TensorRT-LLM forwards are enough: parse in one process, look in another."""
    parent = f"""
import json, os, yaml
from tensorrt_llm.llmapi import llm_args
llm_args.TorchLlmArgs(model="m", **yaml.safe_load({YAML!r}))
print(json.dumps({{k: v for k, v in os.environ.items() if k.startswith(("TRTLLM", "TLLM"))}}))
"""
    forwarded = json.loads(python(parent))
    assert forwarded["TRTLLM_GVR_TOPK"] == "1"
    worker = "from gvr_topk.integrations import environment as e; print(e.mode().name, e.options().stats)"
    assert python(worker, **forwarded).split() == ["ON", "True"]


def test_a_broken_integration_does_not_stop_the_import():
    code = """
import sys
sys.modules["gvr_topk.integrations.tensorrt_llm"] = None
import tensorrt_llm.llmapi.llm_args
print("fine")
"""
    assert python(code).strip() == "fine"


def test_modules_keep_their_own_loader(shape):
    gvr_topk_autoload.install()
    module = load_llm_args()
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_the_op_replacement_still_has_the_originals_attributes(shape):
    load_dsa()
    integration.install()
    op = torch.ops.trtllm.indexer_topk_decode
    assert op.default._schema.name == "trtllm::indexer_topk_decode"
    logits = torch.randn(1, 40)
    out = torch.full((1, 16), -7, dtype=torch.int32)
    op(logits, torch.tensor([40], dtype=torch.int32), out, 1)
    assert set(out[0].tolist()) == set(logits.topk(16).indices[0].tolist())
    assert integration.counters().calls == {("original", "not from the indexer"): 1}

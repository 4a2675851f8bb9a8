"""Loading, patching, refusing and restoring; the YAML key; what other processes pay."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from edited_tree import edited
from engine import (
    LLM_ARGS,
    SHAPES,
    Engine,
    Request,
    dsa_name,
    fake_package,
    load_dsa,
    load_llm_args,
    tree_of,
)
from integration_setup import VARIABLES, lines_of, running
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

import gvr_topk_autoload
from gvr_topk.config import GvrTopkConfig
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.integrations.tensorrt_llm import plugin
from gvr_topk.integrations.tensorrt_llm.inspection import inspect_engine, root_of_engine
from gvr_topk.integrations.tensorrt_llm.selection import DecodeOp

pytestmark = pytest.mark.usefixtures("undisturbed")

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "fakes"
OLD = ("trtllm_1_2", "trtllm_1_3_monolith")
"""Shapes whose configuration does not know ``enable_heuristic_topk``."""

VERSIONS = dict(zip(SHAPES, ("1.2.1", "1.3.0rc2", "1.3.0rc22", "1.3.0rc25", "1.3.0rc27"), strict=True))
YAML = """
sparse_attention_config:
  algorithm: dsa
  enable_heuristic_topk: true
gvr_topk:
  stats: true
"""
PLAIN = "sparse_attention_config: {algorithm: dsa}\n"


def parse(text: str):
    """Read a YAML file the way ``--config`` and ``--extra_llm_api_options`` are read."""
    llm_args = load_llm_args()
    arguments = llm_args.update_llm_args_with_extra_dict({"model": "m"}, yaml.safe_load(text))
    return llm_args.TorchLlmArgs(**arguments)


def autoload() -> None:
    """Watch for TensorRT-LLM's modules as the ``.pth`` file does, with the logger in reach of `lines_of`."""
    gvr_topk_autoload.install(integration.module_loaded)
    importlib.import_module("tensorrt_llm.logger")


def picture(dsa, llm_args) -> dict[str, object]:
    """Everything the integration may change."""
    modules = sys.modules.get("tensorrt_llm._torch.modules.top_k")
    configurations = (llm_args.DeepSeekSparseAttentionConfig, llm_args.TorchLlmArgs)
    return {
        "top_k": modules and modules.TopK._forward_decode,
        "call": dsa.Indexer.sparse_attn_indexer,
        "prepare": dsa.DSAtrtllmAttentionMetadata.prepare,
        "op": torch.ops.trtllm.indexer_topk_decode,
        "fields": [dict(each.model_fields) for each in configurations],
        "classes": [set(vars(each)) for each in configurations],
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "finders": list(sys.meta_path),
    }


@pytest.mark.parametrize("late", [False, True], ids=["hook first", "modules first"])
def test_the_yaml_key_is_accepted_and_reaches_the_environment(shape, late):
    if late:  # as from --custom_module_dirs
        load_llm_args()
        load_dsa()
    assert integration.install()
    args = parse(YAML)
    assert args.sparse_attention_config.enable_heuristic_topk is True
    assert json.loads(os.environ["TRTLLM_GVR_TOPK_YAML"]) == {"enable": True, "options": {"stats": True}}
    assert environment.options().stats and environment.mode() is environment.Mode.ON


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


def test_other_keys_are_still_rejected(shape):
    integration.install()
    with pytest.raises(ValidationError, match="enable_heuristic_topkk"):
        parse(YAML.replace("enable_heuristic_topk:", "enable_heuristic_topkk:"))
    with pytest.raises(ValidationError, match="statss"):
        parse(YAML.replace("stats", "statss"))


WITHOUT = {
    "false": YAML.replace("true", "false", 1),
    "no key": YAML.replace("  enable_heuristic_topk: true\n", ""),
    "no section": "gvr_topk: {stats: true}\n",
    "null": "sparse_attention_config: null\n",
    "neither": "max_batch_size: 4\n",
    "another algorithm": "sparse_attention_config: {algorithm: rocket}\n",
}


@pytest.mark.parametrize("without", WITHOUT.values(), ids=WITHOUT)
def test_the_switch_belongs_to_the_configuration_validated_last(shape, without):
    """On, off, on in one process: an engine that does not ask must not inherit what another one asked."""
    dsa = load_dsa()
    integration.install()
    for text, asked in ((YAML, True), (without, False), (YAML, True), (without, False)):
        parse(text)
        assert environment.mode() is (environment.Mode.ON if asked else environment.Mode.OFF)
        assert environment.options().stats is ("stats: true" in text)
        engine = Engine(dsa, layers=1)
        engine.step([], running(1, done=40))
        state = integration.plugin._integration.hook.state_of(engine.manager)
        assert state == "not asked for" if not asked else state.options.stats
    calls = {path: count for (path, _), count in integration.counters().calls.items()}
    assert calls == {"gvr_topk": 2, "original": 2}


def test_an_engine_keeps_the_switch_it_was_made_with(shape):
    """A configuration that is validated later is another engine's."""
    dsa = load_dsa()
    integration.install()
    parse(YAML)
    engine, request = Engine(dsa, layers=1), Request(1, 30, 99, seed=1, done=40)
    engine.step([], [request])
    parse(PLAIN)
    engine.step([], [request])
    assert integration.counters().calls == {("gvr_topk", "hint"): 2}


def test_a_python_object_of_their_class_is_seen_too(shape):
    integration.install()
    llm_args = load_llm_args()
    section = llm_args.DeepSeekSparseAttentionConfig(enable_heuristic_topk=True)
    assert environment.mode() is environment.Mode.OFF  # nobody has made an engine of it
    llm_args.TorchLlmArgs(model="m", sparse_attention_config=section)
    assert environment.mode() is environment.Mode.ON


@pytest.mark.parametrize("value", ["0", "force"])
def test_the_users_variable_overrules_the_yaml(shape, monkeypatch, value):
    monkeypatch.setenv("TRTLLM_GVR_TOPK", value)
    integration.install()
    for text in (YAML, WITHOUT["false"]):
        parse(text)
        assert os.environ["TRTLLM_GVR_TOPK"] == value and environment.mode().value == value


def test_the_users_options_overrule_the_yaml(shape, monkeypatch):
    monkeypatch.setenv("TRTLLM_GVR_TOPK_OPTIONS", '{"max_ctas": 8}')
    integration.install()
    parse(YAML)
    assert environment.options().max_ctas == 8 and not environment.options().stats


UNREADABLE = [
    *("[]", "{", "7", '"x"', "{not json", "null", "[" * 100_000, "\udcff\udc80"),
    *('{"enable": 3}', '{"options": {"hint": 1}}', '{"other": true}'),
]


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: text[:12].encode("ascii", "replace").decode())
@pytest.mark.parametrize("file", [YAML, PLAIN], ids=["on", "off"])
def test_an_unreadable_carried_value_counts_as_absent(shape, monkeypatch, text, file):
    """Only a stale or foreign value is: it must not stop a server."""
    monkeypatch.setenv("TRTLLM_GVR_TOPK_YAML", text)
    autoload()
    assert environment.mode() is Mode.OFF and environment.options() == GvrTopkConfig()
    for _ in range(2):
        parse(file)
    assert environment.mode() is (Mode.ON if file is YAML else Mode.OFF)
    assert environment.options().stats == (file is YAML)


@pytest.mark.parametrize("text", ["{", '{"path": "fast"}', '{"stats": true, "more": 1}', "[]"])
def test_options_that_cannot_be_read_are_refused_in_one_line(shape, monkeypatch, text):
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "1")
    monkeypatch.setenv("TRTLLM_GVR_TOPK_OPTIONS", text)
    dsa = load_dsa()
    integration.install()
    Engine(dsa).step([], running(1, done=40))
    (line,) = lines_of("warning")
    assert "refused: ValueError: TRTLLM_GVR_TOPK_OPTIONS: wanted the keys of section gvr_topk as JSON" in line
    assert line.isprintable() and "pydantic.dev" not in line
    assert integration.counters().calls == {("original", "error: ValueError"): 2}


def test_a_worker_started_earlier_learns_it_from_the_arguments(shape):
    """Workers of an external MPI launch run before the YAML is read: no variable reaches them."""
    integration.install()
    on, off = pickle.dumps(parse(YAML)), pickle.dumps(parse(PLAIN))
    environment.withdraw()
    for _ in range(2):  # one pool of workers may serve one engine after another
        received = pickle.loads(on)
        assert received.sparse_attention_config.enable_heuristic_topk is True
        assert environment.mode() is environment.Mode.ON and environment.options().stats
        pickle.loads(off)
        assert environment.mode() is environment.Mode.OFF and not environment.options().stats


def test_patched_once_however_often(shape):
    dsa = load_dsa()
    assert integration.install() and integration.installed()
    first = picture(dsa, load_llm_args())
    assert integration.install()
    integration.module_loaded(dsa_name())
    integration.module_loaded(LLM_ARGS)
    assert picture(dsa, load_llm_args()) == first
    assert dsa.Indexer.sparse_attn_indexer.__wrapped__.__module__.startswith("tensorrt_llm")


def test_uninstall_restores_everything(shape):
    dsa, llm_args = load_dsa(), load_llm_args()
    before = picture(dsa, llm_args)
    integration.install()
    changed = picture(dsa, llm_args)
    selection = "top_k" if shape == "trtllm_1_3_rc27" else "op"
    names = ("call", "prepare", selection, "fields", "finders")
    assert all(changed[name] != before[name] for name in names)
    parse(YAML)
    integration.uninstall()
    assert picture(dsa, llm_args) == before
    if shape in OLD:
        with pytest.raises(ValidationError):
            parse(YAML)
    assert integration.install()  # and again
    parse(YAML)


def failing_changes(monkeypatch, nth: int) -> list[int]:
    """Make the nth change of a transaction fail; the list grows by one per change."""
    changes: list[int] = []

    def failing(change):
        def wrapper(self, *args):
            changes.append(1)
            if len(changes) == nth + 1:
                raise OSError("forced")
            change(self, *args)

        return wrapper

    for name in ("set_attribute", "set_item"):
        monkeypatch.setattr(Transaction, name, failing(getattr(Transaction, name)))
    return changes


@pytest.mark.parametrize(
    ("among", "nth"), [*(("layers", n) for n in range(3)), *(("keys", n) for n in range(4))]
)
def test_a_failure_restores_everything_before_it(shape, monkeypatch, among, nth):
    """Among the layers, the keys that are there already stay."""
    dsa, llm_args = load_dsa(), load_llm_args()
    if among == "layers":
        integration.module_loaded(LLM_ARGS)
    before = picture(dsa, llm_args)
    changes = failing_changes(monkeypatch, nth)
    assert not integration.install() and len(changes) == nth + 1
    gvr_topk_autoload.uninstall()
    assert picture(dsa, llm_args) == before
    (line,) = lines_of("warning")
    assert "refused" in line and "OSError: forced" in line
    kept = "our YAML keys are ignored" if among == "layers" else "a YAML file with our keys may be rejected"
    assert kept in line
    assert among == "keys" or parse(YAML).sparse_attention_config.enable_heuristic_topk


DSA = "_torch/attention_backend/sparse/dsa"
RC27 = "_torch/attention/backends/sparse/dsa"
CALL, MADE, OP = "Indexer.sparse_attn_indexer", "Indexer.__init__", "torch.ops.trtllm.indexer_topk_decode"
PREPARE, BUFFERS = "DSAtrtllmAttentionMetadata.prepare", "DSACacheManager.get_indexer_k_cache_buffers"
TOP_K, SECTION = "TopK._forward_decode", "DeepSeekSparseAttentionConfig"
EDITED = [
    ("trtllm_1_2", f"{DSA}.py", "hidden_states: torch.Tensor,", "x: torch.Tensor,", CALL),
    ("trtllm_1_2", f"{DSA}.py", "topk: bool = True", "topk: bool = True, *, extra", CALL),
    ("trtllm_1_2", f"{DSA}.py", "class Indexer(", "class Selector(", MADE),
    ("trtllm_1_2", f"{DSA}.py", "layer_idx=0", "layer=0, layer_idx_=0", MADE),
    ("trtllm_1_3_package", f"{DSA}/metadata.py", "def prepare(self):", "def prepare(self, batch):", PREPARE),
    ("trtllm_1_3_package", f"{DSA}/cache_manager.py", "get_indexer_k_cache_buffers", "get_k", BUFFERS),
    ("trtllm_1_2", "__init__.py", "decode(Tensor logits", "decode(Tensor scores", OP),
    ("trtllm_1_3_rc25", f"{DSA}/indexer.py", "is_generation: Optional", "phase: Optional", CALL),
    ("trtllm_1_3_rc27", f"{RC27}/indexer.py", "weights: torch.Tensor", "weight: torch.Tensor", CALL),
    ("trtllm_1_3_rc27", "_torch/modules/top_k.py", "scan_lengths: torch", "lengths: torch", TOP_K),
    ("trtllm_1_2", "llmapi/llm_args.py", SECTION, "SectionOfDsa", SECTION),
]
"""Shape, file, a text of it, what replaces the text, and the name that is refused."""


@pytest.mark.parametrize(("shape", "file", "old", "new", "point"), EDITED)
def test_another_signature_is_refused_with_one_message(tmp_path, shape, file, old, new, point):
    root = edited(tree_of(shape), tmp_path / shape, [(f"tensorrt_llm/{file}", old, new)])
    with fake_package(shape, root=root):
        autoload()
        load_llm_args()
        dsa = load_dsa()
        assert not integration.installed()
        assert not isinstance(torch.ops.trtllm.indexer_topk_decode, DecodeOp)
        assert not hasattr(getattr(dsa, "Indexer", dsa), "__wrapped__")
        (line,) = lines_of("warning")
        assert VERSIONS[shape] in line and point in line and "wanted" in line and "got" in line
        assert "Serving continues with TensorRT-LLM's own top-k" in line and "GVR_TOPK_DISABLE=1" in line
        state = dict(integration.describe())
        assert state["would happen"].startswith("refused: ")
        if point != OP:
            assert state[point].startswith(("missing", "mismatch"))


def unlike(folder: Path, file: str, old: str, new: str) -> Path:
    """A 1.2 that is unlike the table."""
    return edited(tree_of("trtllm_1_2"), folder, [(f"tensorrt_llm/{file}", old, new)])


OTHER_OP = ("__init__.py", "int next_n, ", "int rows, ")


@pytest.mark.parametrize("why", ["refused", "refused later", "switched off"])
def test_a_server_starts_with_its_yaml_when_we_do_not(tmp_path, monkeypatch, why):
    """The strict configuration of 1.2 would stop it at our keys."""
    root = unlike(tmp_path / "class", f"{DSA}.py", "class Indexer(", "class Selector(")
    if why == "switched off":
        monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
        root = FAKES / "trtllm_1_2"
    if why == "refused later":
        root = unlike(tmp_path / "op", *OTHER_OP)
    with fake_package("trtllm_1_2", root=root):
        autoload()
        if why == "refused later":
            load_dsa()
        for _ in range(2):
            args = parse(YAML)
            assert args.sparse_attention_config.enable_heuristic_topk and args.gvr_topk == {"stats": True}
        assert "TRTLLM_GVR_TOPK_YAML" not in os.environ
        ignored = [line for line in lines_of("warning") if "ignored: sparse_attention_config" in line]
        assert len(ignored) == 1
        assert ("GVR_TOPK_DISABLE is set" if why == "switched off" else "found TensorRT-LLM") in ignored[0]
        with pytest.raises(ValidationError, match="enable_heuristic_topkk"):
            parse(YAML.replace("enable_heuristic_topk:", "enable_heuristic_topkk:"))


def test_what_was_published_is_withdrawn_when_the_op_does_not_fit(tmp_path):
    """The op is only known once its library is loaded: the YAML was read by then."""
    root = unlike(tmp_path / "op", *OTHER_OP)
    with fake_package("trtllm_1_2", root=root):
        gvr_topk_autoload.install(integration.module_loaded)
        parse(YAML)
        assert environment.mode() is environment.Mode.ON
        load_dsa()
        assert environment.mode() is environment.Mode.OFF and not integration.installed()


WITH_OP = SHAPES[:4]


@pytest.mark.parametrize("shape", WITH_OP)
def test_an_op_registered_after_dsa_is_replaced_at_the_first_step(monkeypatch, shape):
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "1")
    with fake_package(shape, late_ops=True):
        gvr_topk_autoload.install(integration.module_loaded)
        dsa = load_dsa()
        assert integration.installed() and lines_of("warning") == []
        assert not hasattr(torch.ops.trtllm, "indexer_topk_decode")
        sys.modules["fake_base"].load_ops()
        engine = Engine(dsa)
        for _ in range(2):
            engine.step([], running(1, done=40))
        assert integration.counters().calls == {("gvr_topk", "hint"): 4}
        integration.uninstall()
        assert not isinstance(torch.ops.trtllm.indexer_topk_decode, DecodeOp)


@pytest.mark.parametrize("said", ["indexer_topk_decode", "AttributeError"])
def test_a_late_op_that_does_not_fit_or_cannot_be_inspected_is_refused(monkeypatch, tmp_path, said):
    """At the first step; one that never comes, too."""
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "1")
    with fake_package("trtllm_1_2", root=unlike(tmp_path / "op", *OTHER_OP), late_ops=True):
        gvr_topk_autoload.install(integration.module_loaded)
        dsa = load_dsa()
        original = dsa.DSAtrtllmAttentionMetadata.prepare.__wrapped__
        sys.modules["fake_base"].load_ops()
        if said == "AttributeError":
            monkeypatch.setattr(plugin, "check_live", lambda *args: args.default)
        Engine(dsa).step([], running(1, done=40))
        (line,) = lines_of("warning")
        assert "refused" in line and said in line and "int rows" not in line
        assert dsa.DSAtrtllmAttentionMetadata.prepare is original and not integration.installed()


def test_models_of_theirs_may_contain_themselves():
    with fake_package("trtllm_1_2"):
        model = type("Node", (BaseModel,), {"__module__": "tensorrt_llm.serve", "__annotations__": {}})
        model.model_fields["kids"] = FieldInfo(annotation=list[model])
        integration.install()
        assert parse(YAML).sparse_attention_config.enable_heuristic_topk


def test_uninstalling_restores_what_workers_are_told(shape, monkeypatch):
    monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "force")
    integration.install()
    load_llm_args()
    parse(YAML)
    assert os.environ["TRTLLM_GVR_TOPK"] == "0"
    integration.uninstall()
    assert os.environ["TRTLLM_GVR_TOPK"] == "force"


def test_switched_off(shape, monkeypatch):
    monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
    dsa, llm_args = load_dsa(), load_llm_args()
    integration.module_loaded(LLM_ARGS)
    before = picture(dsa, llm_args)
    assert integration.install() is False
    gvr_topk_autoload.uninstall()
    integration.module_loaded(dsa_name())
    assert picture(dsa, llm_args) == before
    outlook = dict(integration.describe())["would happen"]
    assert outlook == "nothing: GVR_TOPK_DISABLE is set; our YAML keys are accepted and ignored"


def test_a_wrong_value_of_the_variable_is_named(shape, monkeypatch):
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "yes")
    with pytest.raises(ValueError, match=r"TRTLLM_GVR_TOPK: wanted 0, 1 or force, got 'yes'"):
        environment.mode()
    assert "TRTLLM_GVR_TOPK: wanted" in dict(integration.describe())["would happen"]


def test_describe_imports_nothing(shape):
    rows = dict(integration.describe())
    assert "tensorrt_llm" not in sys.modules
    assert rows["TensorRT-LLM"].startswith(f"{VERSIONS[shape]} in ")
    assert rows["sources of"] == inspect_engine(root_of_engine()).shape.versions
    for point in inspect_engine(root_of_engine()).shape.points:
        assert rows[point.name].startswith(("ok: ", "later ("))
    assert rows["would happen"] == (
        "on where the YAML has sparse_attention_config.enable_heuristic_topk: true, after install()"
    )
    gvr_topk_autoload.install(integration.module_loaded)
    assert dict(integration.describe())["import hook"] == "active"


def test_describe_says_where_theirs_would_run(shape, monkeypatch):
    gvr_topk_autoload.install(integration.module_loaded)
    ours = "on where the YAML has sparse_attention_config.enable_heuristic_topk: true"
    assert dict(integration.describe(90))["would happen"] == ours
    blackwell = dict(integration.describe(100))["would happen"]
    if shape in OLD:
        assert blackwell == ours
    else:
        assert "its own heuristic top-k on a GPU of compute capability 10.0" in blackwell
        assert blackwell.startswith("off: ") and "TRTLLM_GVR_TOPK=force runs ours instead" in blackwell
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "force")
    assert dict(integration.describe(100))["would happen"] == "on: TRTLLM_GVR_TOPK=force"


def test_describe_says_why_the_pth_file_did_not_run(tmp_path, monkeypatch):
    def hook() -> str:
        with fake_package("trtllm_1_2"):
            return dict(integration.describe())["import hook"]

    monkeypatch.setattr(gvr_topk_autoload, "__file__", str(tmp_path / "gvr_topk_autoload.py"))
    assert hook().startswith("not active: there is no gvr_topk_autoload.pth beside ")
    (tmp_path / "gvr_topk_autoload.pth").touch()
    target = hook()  # as pip install --target leaves it
    assert f"Python runs no gvr_topk_autoload.pth in {tmp_path}" in target
    assert "without --target" in target and "--custom_module_dirs" in target
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    assert "did not run (python -S or -I?)" in hook()


def test_describe_without_the_engine():
    assert integration.describe()[0] == ("TensorRT-LLM", "not installed")


def run_away(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with these variables and none of our own."""
    environ = {key: value for key, value in os.environ.items() if key not in VARIABLES} | variables
    return subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=120)


def python(code: str, **variables: str) -> str:
    """Run code in a fresh process that starts as an environment with the ``.pth`` file would."""
    pth = (ROOT / "packaging" / "gvr_topk_autoload.pth").read_text()
    command = [sys.executable, "-S", "-c", f"{pth}\n{code}"]
    search = os.pathsep.join([str(ROOT), str(FAKES), str(FAKES / "trtllm_1_2"), *sys.path])
    done = run_away(command, PYTHONPATH=search, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_other_processes_import_nothing():
    loaded = python("import sys; print(*sorted(sys.modules))").split()
    assert "gvr_topk_autoload" in loaded
    bare = run_away([sys.executable, "-S", "-c", "import os, sys; print(*sorted(sys.modules))"])
    assert set(loaded) - set(bare.stdout.split()) <= {"gvr_topk_autoload", "__future__"}


PTH = ROOT / "packaging" / "gvr_topk_autoload.pth"


def site_start(folder: Path, code: str, before: str = "pass", **variables: str) -> tuple[str, str]:
    """Output and errors of a Python whose site folder is `folder`, with `before` run ahead of it."""
    program = f"import site, sys; {before}; site.addsitedir({str(folder)!r}); {code}"
    done = run_away([sys.executable, "-S", "-E", "-c", program], **variables)
    return done.stdout.strip(), done.stderr


@pytest.fixture
def site_folder(tmp_path):
    shutil.copy(PTH, tmp_path)
    shutil.copy(ROOT / "gvr_topk_autoload.py", tmp_path)
    return tmp_path


FIRST = "print(getattr(sys.meta_path[0], '__module__', ''))"


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_site_runs_the_pth_file(site_folder, value):
    """Switched off too: a YAML file with our keys must stay valid then."""
    variables = {} if value is None else {"GVR_TOPK_DISABLE": value}
    assert site_start(site_folder, FIRST, **variables) == ("gvr_topk_autoload", "")
    code = "print(gvr_topk_autoload.Finder.callback, 'gvr_topk' in sys.modules)"
    called = "gvr_topk.integrations.tensorrt_llm:module_loaded False"
    assert site_start(site_folder, f"import gvr_topk_autoload; {code}", **variables) == (called, "")


@pytest.mark.parametrize(
    ("value", "disabled"),
    [
        *((value, False) for value in ("", "0", "false", "False", "NO", "off", " 0 ")),
        *((value, True) for value in ("1", "true", "yes", "2")),
    ],
)
def test_it_can_be_switched_off(value, disabled, monkeypatch):
    monkeypatch.setenv("GVR_TOPK_DISABLE", value)
    assert environment.disabled() == gvr_topk_autoload.disabled() == disabled


def test_half_an_uninstall_is_silent(site_folder):
    """Pip removes the module and leaves the .pth file, or somebody deletes one of them by hand."""
    (site_folder / "gvr_topk_autoload.py").unlink()
    assert site_start(site_folder, FIRST) == ("_frozen_importlib", "")


SHOW_MODE = "from gvr_topk.integrations._kit import environment as e; print(e.mode().name, e.options().stats)"


def test_parent_to_worker_through_the_environment():
    """The variables TensorRT-LLM forwards are enough: parse in one process, look in another."""
    parent = f"""
import json, os, yaml
from tensorrt_llm.llmapi import llm_args
llm_args.TorchLlmArgs(model="m", **yaml.safe_load({YAML!r}))
print(json.dumps({{k: v for k, v in os.environ.items() if k.startswith(("TRTLLM", "TLLM"))}}))
"""
    forwarded = json.loads(python(parent))
    assert list(forwarded) == ["TRTLLM_GVR_TOPK_YAML"]
    assert python(SHOW_MODE, **forwarded).split() == ["ON", "True"]


SEND = """
import os, pickle, yaml
from tensorrt_llm.llmapi import llm_args
print(pickle.dumps(llm_args.TorchLlmArgs(model="m", **yaml.safe_load({!r}))).hex())
print(os.environ.get("TRTLLM_GVR_TOPK"))
"""
"""A parent that sends the arguments of a YAML file, and how its own switch stands."""

RECEIVE = f"import pickle; pickle.loads(bytes.fromhex({{!r}})); {SHOW_MODE}"


def test_a_worker_that_was_started_with_the_key_serves_an_engine_without_it():
    """What a worker inherits from its parent is not the user's word: the next engine's arguments count."""
    sent, _ = python(SEND.format(PLAIN)).split()
    inherited = {"TRTLLM_GVR_TOPK_YAML": '{"enable": true, "options": {"stats": true}}'}
    assert python(RECEIVE.format(sent), **inherited).split() == ["OFF", "False"]


def test_a_worker_of_a_parent_that_is_switched_off_is_off():
    """It inherits the variables TRTLLM* alone, and its arguments have our keys."""
    sent, switch = python(SEND.format(YAML), GVR_TOPK_DISABLE="1").split()
    assert python(RECEIVE.format(sent), TRTLLM_GVR_TOPK=switch).split() == ["OFF", "True"]


def test_a_broken_integration_does_not_stop_the_import():
    code = """
import sys
sys.modules["gvr_topk.integrations.tensorrt_llm"] = None
import tensorrt_llm.llmapi.llm_args
print("fine")
"""
    assert python(code).strip() == "fine"


@pytest.mark.parametrize("asked", [True, False])
def test_an_indexer_of_another_backend_is_said_once_and_stays_theirs(monkeypatch, asked):
    """CSA2 overrides the call that tells us the layer, and prepares its batches as DSA does."""
    monkeypatch.setenv("TRTLLM_GVR_TOPK", str(int(asked)))
    with fake_package("trtllm_1_3_rc27"):
        dsa = load_dsa()
        integration.install()

        class CSA2Indexer(dsa.Indexer):
            def sparse_attn_indexer(self, metadata, hidden_states, *rest, q_scale=None, is_generation=None):
                out = torch.full((metadata.num_generations, 16), -7, dtype=torch.int32)
                lengths = metadata.kv_lens_cuda_runtime[: len(out)]
                scores = torch.randn(len(out), 160)
                named = {"sequence_lengths": lengths, "scan_lengths": lengths}
                self.top_k(scores, out, is_prefill=False, next_n=1, **named)
                assert (out >= 0).all()
                return out

        engine = Engine(dsa, layers=1)
        config = engine.metadata.sparse_attention_config
        engine.indexers = [CSA2Indexer(None, None, None, False, config, None, layer_idx=0)]
        for done in (60, 61, 62):
            engine.step([], [Request(1, 60, 99, seed=1, done=done)])
        assert integration.counters().calls == {("original", "not from the indexer"): 3}
        said = lines_of("warning")
        assert len(said) == int(asked)
        assert all("not in use: a sparse backend of TensorRT-LLM" in line for line in said)


def test_a_topk_that_no_indexer_asks_for_stays_theirs(shape):
    """And the op that stands in for theirs still has the attributes of theirs."""
    load_dsa()
    integration.install()
    logits, out = torch.randn(1, 40), torch.full((1, 16), -7, dtype=torch.int32)
    lengths = torch.tensor([40], dtype=torch.int32)
    if shape in WITH_OP:
        op = torch.ops.trtllm.indexer_topk_decode
        assert op.default._schema.name == "trtllm::indexer_topk_decode"
        op(logits, lengths, out, 1)
    else:
        top_k = sys.modules["tensorrt_llm._torch.modules.top_k"].TopK(16)
        top_k(logits, out, is_prefill=False, sequence_lengths=lengths, scan_lengths=lengths)
    assert set(out[0].tolist()) == set(logits.topk(16).indices[0].tolist())
    assert integration.counters().calls == {("original", "not from the indexer"): 1}

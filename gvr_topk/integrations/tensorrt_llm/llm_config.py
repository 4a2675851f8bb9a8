"""Make TensorRT-LLM's strict configuration classes accept our keys, and report what a validated one asks for.

``DeepSeekSparseAttentionConfig`` forbids unknown keys, and 1.2 does not know ``enable_heuristic_topk``.
The class gains the field in place, and every model that contains the class is rebuilt, because pydantic
copies a nested model's schema into its users. If the field exists already, it keeps its meaning.

Our keys apply to the whole configuration, so they are read when ``TorchLlmArgs`` is validated, even if
neither key is written: an engine without the keys must not inherit those of another engine in the same
process. They are read again when such an object arrives in a worker that was started before the YAML file was
read. The values cannot travel inside the object, because TensorRT-LLM's model loader rebuilds the object
field by field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter
from pydantic.fields import FieldInfo

from gvr_topk.config import SWITCH
from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.integrations.tensorrt_llm.type_hints import classes_in
from gvr_topk.integrations.tensorrt_llm.upstream import ARGS, CONFIG

SECTION = "gvr_topk"
SPARSE = "sparse_attention_config"

Note = Callable[..., None]
"""Takes ``enable`` (bool) or ``options`` (mapping), each by keyword."""


def apply(module: ModuleType, transaction: Transaction, note: Note) -> None:
    """Add our keys to the classes of ``llm_args``, which is already checked against the table.

    `note` is called with what each validated or unpickled ``TorchLlmArgs`` asks for.
    """
    config: type[BaseModel] = getattr(module, CONFIG.name)
    args: type[BaseModel] = getattr(module, ARGS.name)
    copies = [config, *_containing(config, args)]
    # On the way back the fields are restored first, then the same classes are rebuilt.
    transaction.callback(_rebuild, copies)
    if SWITCH not in config.model_fields:
        text = "Exact Guess-Verify-Refine top-k in the decode indexer (gvr_topk)."
        _add_field(config, SWITCH, bool, Field(default=False, description=text), transaction)

    def note_switch(section: Any) -> Any:
        note(enable=bool(getattr(section, SWITCH, False)))
        return section

    def note_options(section: Any) -> Any:
        note(options={} if section is None else section)
        return section

    _watch_field(args, SPARSE, note_switch, transaction)
    text = "Options of gvr_topk."
    noted = Annotated[Any, AfterValidator(note_options)]
    _add_field(
        args, SECTION, noted, Field(default=None, description=text, validate_default=True), transaction
    )
    arrive = args.__setstate__

    def __setstate__(self: BaseModel, state: dict[Any, Any]) -> None:
        arrive(self, state)
        note_switch(getattr(self, SPARSE, None))
        note_options(getattr(self, SECTION, None))

    transaction.set_attribute(args, "__setstate__", __setstate__)
    _rebuild(copies)
    if TypeAdapter(config).validate_python({SWITCH: False}).model_dump()[SWITCH] is not False:
        raise RuntimeError(f"{CONFIG.name} did not take the field {SWITCH}")


def _add_field(
    model: type[BaseModel], name: str, annotation: Any, field: Any, transaction: Transaction
) -> None:
    """Add a field to a model that lacks it; the caller then rebuilds the model."""
    # Subclasses made later find their fields through the annotations.
    annotations = {**inspect.get_annotations(model), name: annotation}
    transaction.set_attribute(model, "__annotations__", annotations)
    transaction.set_item(model.model_fields, name, FieldInfo.from_annotated_attribute(annotation, field))


def _watch_field(
    model: type[BaseModel], name: str, look: Callable[[Any], Any], transaction: Transaction
) -> None:
    """Call `look` with every validated value of a field, its default included."""
    field = copy(model.model_fields[name])
    field.metadata = [*field.metadata, AfterValidator(look)]
    field.validate_default = True
    transaction.set_item(model.model_fields, name, field)


def _containing(*models: type[BaseModel]) -> list[type[BaseModel]]:
    """Return `models` and all models whose schema contains a copy of one of them, inner ones first."""
    graph = {
        model: {
            inner
            for field in model.model_fields.values()
            for inner in classes_in(field.annotation, BaseModel)
        }
        for model in _subclasses(BaseModel)
        if model.__module__.split(".")[0] == models[0].__module__.split(".")[0]
    }
    touched = set(models)
    order: list[type[BaseModel]] = []
    seen: set[type[BaseModel]] = set()

    def visit(model: type[BaseModel]) -> None:  # no sorter: models may contain themselves
        if model in graph and model not in seen:
            seen.add(model)
            for inner in graph[model]:
                visit(inner)
            order.append(model)

    for model in graph:
        visit(model)
    for model in order:
        if graph[model] & touched:
            touched.add(model)
    return [model for model in order if model in touched]


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for subclass in model.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _rebuild(models: list[type[BaseModel]]) -> None:
    for model in models:
        model.model_rebuild(force=True)

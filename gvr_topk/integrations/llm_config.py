"""Lets TensorRT-LLM's strict configuration classes accept our keys, and carries their values on.

``DeepSeekSparseAttentionConfig`` forbids unknown keys, and 1.2 does not know ``enable_heuristic_topk``.
The class gains the field in place and every model that contains it is rebuilt, because pydantic copies
a nested model's schema into its users. Where the field exists already it keeps its meaning; only its
value is noted.

The value cannot travel inside the object: the model loader of TensorRT-LLM rebuilds the object field by
field. It goes through the environment, written when a value is validated and also when an object
arrives in a worker that was started before the YAML file was read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from graphlib import TopologicalSorter
from types import ModuleType
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter
from pydantic.fields import FieldInfo

from gvr_topk.integrations import environment
from gvr_topk.integrations.patch_points import ARGS, CONFIG
from gvr_topk.integrations.transaction import Transaction

KEY = "enable_heuristic_topk"
SECTION = "gvr_topk"


def apply(module: ModuleType, transaction: Transaction) -> bool:
    """Give the classes of ``llm_args`` our keys.

    Parameters
    ----------
    module : module
        ``tensorrt_llm.llmapi.llm_args``, already checked against the table.
    transaction : Transaction
        Takes the undo of every change.

    Returns
    -------
    bool
        Whether this version knew ``enable_heuristic_topk`` already.
    """
    config: type[BaseModel] = getattr(module, CONFIG.name)
    args: type[BaseModel] = getattr(module, ARGS.name)
    native = KEY in config.model_fields
    _watch(
        config,
        KEY,
        bool,
        Field(default=False, description="Exact Guess-Verify-Refine top-k in the decode indexer (gvr_topk)."),
        environment.publish_enabled,
        transaction,
    )
    _watch(
        args,
        SECTION,
        Any,
        Field(default=None, description="Options of gvr_topk."),
        environment.publish_options,
        transaction,
    )
    rebuild = [config, *_containing(config, args)]
    # On the way back the fields are restored first, then the same classes are rebuilt.
    transaction.add_first(lambda: _rebuild(rebuild))
    _rebuild(rebuild)
    if TypeAdapter(config).validate_python({KEY: False}).model_dump()[KEY] is not False:
        raise RuntimeError(f"{CONFIG.name} did not take the field {KEY}")
    return native


def _watch(
    model: type[BaseModel],
    name: str,
    annotation: Any,
    new_field: Any,
    publish: Callable[[Any], None],
    transaction: Transaction,
) -> None:
    """Add a field, or take the existing one, and call `publish` with every value it is given."""

    def note(value: Any) -> Any:
        publish(value)
        return value

    fields = model.model_fields
    existing = fields.get(name)
    noted: Any = Annotated[existing.annotation if existing else annotation, AfterValidator(note)]
    if existing is None:
        field = FieldInfo.from_annotated_attribute(noted, new_field)
        # Subclasses made later find their fields through the annotations.
        annotations = {**inspect.get_annotations(model), name: annotation}
        transaction.set_attribute(model, "__annotations__", annotations)
    else:
        extra = FieldInfo.from_annotation(noted).metadata
        field = copy(existing)
        field.metadata = [*existing.metadata, *extra]
    transaction.set_item(fields, name, field)

    arrive = model.__setstate__

    def __setstate__(self: BaseModel, state: dict[Any, Any]) -> None:
        arrive(self, state)
        if name in self.model_fields_set:
            publish(getattr(self, name))

    transaction.set_attribute(model, "__setstate__", __setstate__)


def _containing(*models: type[BaseModel]) -> list[type[BaseModel]]:
    """Models in whose schema one of `models` is copied, themselves included, inner ones first."""
    graph = {
        model: {inner for field in model.model_fields.values() for inner in _models_in(field.annotation)}
        for model in _subclasses(BaseModel)
        if model.__module__.split(".")[0] == models[0].__module__.split(".")[0]
    }
    touched = set(models)
    order = [model for model in TopologicalSorter(graph).static_order() if model in graph]
    for model in order:
        if graph[model] & touched:
            touched.add(model)
    return [model for model in order if model in touched]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for subclass in model.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _rebuild(models: list[type[BaseModel]]) -> None:
    for model in models:
        model.model_rebuild(force=True)

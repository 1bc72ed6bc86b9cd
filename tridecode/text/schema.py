"""The meaning of a JSON schema as a response format: closed objects, bounded numbers, and keywords that ask nothing.

A schema as a response format differs from a schema as a check. An object that does not set `additionalProperties` has
only the properties that the schema names, and a number has a limited number of digits. Otherwise a model could write
properties and digits without end. Unknown formats, and keywords without a demand, are ignored, as by a validator.
"""

from typing import Any

# The formats that llguidance enforces. Others, such as idn-email and regex, are accepted without effect.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid unknown".split())
MAX_NUMBER = 2**63 - 1024  # The largest integer that a double and a signed 64-bit integer both represent exactly.
DECIMALS = 1e-10  # The last decimal place of a number.
OPEN = "x-open"  # A keyword with the definitions that a closed schema combines with others.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_PARTS = (
    "items", "prefixItems", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then",
    "else", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_ALTERNATIVES = ("anyOf", "oneOf")
_COMBINES = ("properties", "patternProperties", "required", "allOf", "$ref", *_ALTERNATIVES)
_ANY: tuple = (True, {})


def response_schema(schema: dict, open_objects: bool = False) -> dict:
    """Return the schema that an answer follows, in keywords that llguidance supports if there are any.

    Args:
        schema: a JSON schema without `default` and `examples`.
        open_objects: whether objects that do not set `additionalProperties` may have other properties.
    """
    return _Schema(schema, open_objects).whole()


class _Schema:
    """The conversion of one schema."""

    def __init__(self, root: dict, open_objects: bool):
        self._root, self._open_objects = root, open_objects
        self._open: dict[str, int] = {}  # Reference -> the index of its target, left open, in the keyword OPEN.

    def whole(self) -> dict:
        """Return the converted schema."""
        made: dict = self._convert(self._root)
        several: list[Any] = []
        while len(several) < len(self._open):
            target = self._target([*self._open][len(several)])
            several.append(self._convert(target, inner=True))
        return made | {OPEN: several} if several else made

    def _convert(self, schema, inner: bool = False):
        """Return a converted part.

        Args:
            inner: whether the part is combined with others. Then what contains it closes the object.
        """
        if not isinstance(schema, dict):
            return schema
        schema = _demands(schema)
        force = schema.get("unevaluatedProperties") is False
        if force:
            del schema["unevaluatedProperties"]
        combined = [key for key in _COMBINES if key in schema]
        alone = len(combined) == 1 and combined[0] not in ("properties", "patternProperties")
        if combined == ["allOf"] and len(schema["allOf"]) != 1:
            alone = False
        says = "additionalProperties" in schema
        below = inner or says or not alone  # Whether the parts in place are combined with others.
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                made[key] = {name: self._convert(part) for name, part in value.items()}
            elif key in ("allOf", *_ALTERNATIVES) and isinstance(value, list):
                made[key] = [self._convert(part, below) for part in value]
            elif key == "$ref" and below and isinstance(value, str) and isinstance(self._target(value), dict):
                made[key] = f"#/{OPEN}/{self._open.setdefault(value, len(self._open))}"
            elif key in _PARTS:
                made[key] = [self._convert(part) for part in value] if isinstance(value, list) else self._convert(value)
            else:
                made[key] = value
        if says or not force and (inner or alone or self._open_objects):
            return made
        if not combined:
            return made | ({"additionalProperties": False} if force else {})
        return self._close(schema, made)

    def _close(self, schema: dict, made: dict) -> dict:
        """Return `made`, the converted `schema`, without properties that the schema does not name."""
        alternatives = [key for key in _ALTERNATIVES if isinstance(schema.get(key), list)]
        own = self._names({key: value for key, value in schema.items() if key not in _ALTERNATIVES})
        branches = [(key, self._names(part)) for key in alternatives for part in schema[key]]
        if own is None or any(names is None for _, names in branches):
            return made  # A part sets `additionalProperties`.
        if not any(names for _, names in branches):
            return _closed(made, own) if own else made
        if len(alternatives) > 1:
            return made
        (key,) = alternatives
        several = zip(made[key], branches)
        return made | {key: [_closed(part, own | (names or {})) if isinstance(part, dict) else part
                             for part, (_, names) in several]}  # fmt: skip

    def _names(self, schema) -> dict[tuple[str, str], None] | None:
        """Return the (keyword, name) pairs of the properties that a schema and its parts in place name.

        Returns None if one of them sets `additionalProperties`.
        """
        names: dict[tuple[str, str], None] = {}
        left, seen = [schema], set()
        while left:
            part = left.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            if "additionalProperties" in part:
                return None
            for key in ("properties", "patternProperties"):
                if isinstance(part.get(key), dict):
                    names |= {(key, name): None for name in part[key]}
            if isinstance(part.get("required"), list):
                names |= {("properties", name): None for name in part["required"] if isinstance(name, str)}
            for key in ("allOf", *_ALTERNATIVES):
                left += part[key] if isinstance(part.get(key), list) else []
            left.append(self._target(part.get("$ref")))
        return names

    def _target(self, path):
        """Return the part of the schema to which a reference such as # or #/$defs/name points, or None."""
        first, *names = path.split("/") if isinstance(path, str) else [""]
        part: Any = self._root if first == "#" else None
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list):
                part = part[int(name)] if name.isdecimal() and int(name) < len(part) else None
            else:
                part = part.get(name) if isinstance(part, dict) else None
        return part


def _closed(schema: dict, names: dict[tuple[str, str], None]) -> dict:
    """Return a schema of an object with no properties but these."""
    made = schema | {"additionalProperties": False}
    for key in {key: None for key, _ in names}:
        own = schema.get(key, {})
        made[key] = {name: own.get(name, True) for keyword, name in names if keyword == key} | own
    return made


def _demands(schema: dict) -> dict:
    """Return a schema without keywords that demand nothing, and with bounds for its numbers."""
    made = {key: value for key, value in schema.items() if value is not None or key == "const"}
    if made.get("format") not in FORMATS or "enum" in made or "const" in made:
        made.pop("format", None)
    if not str(made.get("$schema", "")).startswith(("http://json-schema.org/", "https://json-schema.org/")):
        made.pop("$schema", None)
    if isinstance(made.get("required"), bool):  # Draft 3.
        del made["required"]
    if made.get("minContains") == 0 and "maxContains" not in made or "contains" not in made:
        for key in ("contains", "minContains", "maxContains"):
            made.pop(key, None)
    if "then" not in made and "else" not in made or "if" not in made:
        for key in ("if", "then", "else"):
            made.pop(key, None)
    if not isinstance(made.get("items"), list):
        made.pop("additionalItems", None)
    for key, neutral in _NEUTRAL.items():
        if key in made and any(type(made[key]) is type(value) and made[key] == value for value in neutral):
            del made[key]
    return made | _bounds(made)


_NEUTRAL: dict[str, tuple] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (*_ANY, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": _ANY,
    "unevaluatedItems": _ANY,
    "nullable": (True, False),
}


def _bounds(schema: dict) -> dict:
    """Return the bounds that a schema of a number lacks."""
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if not {"number", "integer"}.intersection(map(str, types)) or "enum" in schema or "const" in schema:
        return {}
    made: dict[str, float] = {}
    if not {"minimum", "exclusiveMinimum"} & schema.keys():
        made["minimum"] = -MAX_NUMBER
    if not {"maximum", "exclusiveMaximum"} & schema.keys():
        made["maximum"] = MAX_NUMBER
    if "number" in types and "multipleOf" not in schema:
        made["multipleOf"] = DECIMALS
    return made


# ---- schemas that compile without doubt

_TYPES: dict[str, Any] = {
    "string": str, "boolean": bool, "null": type(None), "array": list, "object": dict, "number": (int, float),
    "integer": int,
}  # fmt: skip
_LIMITS = (("minLength", "maxLength"), ("minItems", "maxItems"))
_LIMIT = 1000  # The largest length and number of items in a plain schema.
_CHECKED = frozenset(
    "type properties required items enum const anyOf $ref $defs definitions additionalProperties minimum maximum "
    "minLength maxLength minItems maxItems".split()
)
_OTHERS = frozenset(
    "$schema $id $anchor $dynamicRef $dynamicAnchor $vocabulary id allOf oneOf not if then else dependentSchemas "
    "dependentRequired dependencies prefixItems additionalItems contains minContains maxContains patternProperties "
    "propertyNames unevaluatedItems unevaluatedProperties multipleOf exclusiveMaximum exclusiveMinimum pattern "
    "uniqueItems maxProperties minProperties contentEncoding contentMediaType contentSchema x-guidance".split()
)


def is_plain(schema: dict) -> bool:
    """Return whether a schema certainly compiles: only common keywords, with well-formed values, and no recursion."""
    find, parts = _Schema(schema, False)._target, [(schema, frozenset[int]())]
    for _ in range(10_000):
        if not parts:
            return True
        part, around = parts.pop()
        if part is True:
            continue
        if not isinstance(part, dict) or id(part) in around or not _well_formed(part):
            return False
        around |= {id(part)}
        below = [*part.get("properties", {}).values(), *part.get("anyOf", ())]
        below += [part[key] for key in ("items",) if key in part]
        if part.get("additionalProperties") not in (None, False):
            below.append(part["additionalProperties"])
        if "$ref" in part:
            below.append(find(part["$ref"]))
        parts += [(each, around) for each in below]
    return False


def _well_formed(schema: dict) -> bool:
    """Return whether the keywords of a schema, without its parts, are common and have values that fit together."""
    if _OTHERS & schema.keys() or any(schema[key] is None for key in _CHECKED & schema.keys() - {"const"}):
        return False
    types = schema.get("type", list(_TYPES))
    types = types if isinstance(types, list) else [types]
    if not types or not all(isinstance(name, str) and name in _TYPES for name in types):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else [None])
    if not isinstance(values, list) or not values or "enum" in schema and "const" in schema:
        return False
    if ("enum" in schema or "const" in schema) and not all(_fits(value, types) for value in values):
        return False
    shapes: dict[str, type | tuple] = {"properties": dict, "required": list, "anyOf": list, "$ref": str}
    if not all(isinstance(schema[key], kind) for key, kind in shapes.items() if key in schema):
        return False
    if not all(isinstance(name, str) for name in schema.get("required", ())) or schema.get("anyOf") == []:
        return False
    if schema.get("format") in FORMATS and {"minLength", "maxLength", "pattern"} & schema.keys():
        return False  # Perhaps no text of the format fits.
    for low, high in _LIMITS:
        least, most = schema.get(low, 0), schema.get(high, _LIMIT)
        if type(least) is not int or type(most) is not int or not 0 <= least <= most <= _LIMIT:
            return False
    bounds = [schema.get("minimum", -MAX_NUMBER), schema.get("maximum", MAX_NUMBER)]
    if not all(type(bound) is int for bound in bounds) or not -MAX_NUMBER <= bounds[0] <= bounds[1] <= MAX_NUMBER:
        return False
    # A value that several keywords restrict may not exist.
    restricting = (_CHECKED & schema.keys()) - {"$defs", "definitions"}
    return all(restricting <= allowed for key, allowed in _ALONE.items() if key in schema)


_ALONE = {"$ref": {"$ref"}, "anyOf": {"anyOf"}, "enum": {"enum", "type"}, "const": {"const", "type"}}


def _fits(value, types: list[str]) -> bool:
    """Return whether a constant has one of the types and can be represented exactly."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > 2**53:
        return False
    kinds = [_TYPES[name] for name in types if isinstance(value, bool) == (name == "boolean")]
    return not isinstance(value, (list, dict)) and any(isinstance(value, kind) for kind in kinds)

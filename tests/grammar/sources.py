"""Grammars for tests."""

import json

from cluster.request import Grammar, GrammarKind

COLOURS = ("red", "green", "dark blue")
PERSON = {
    "type": "object",
    "properties": {
        "colour": {"enum": [*COLOURS]},
        "count": {"type": "integer", "minimum": 3, "maximum": 120},
        "name": {"type": "string", "maxLength": 6},
        "ok": {"type": "boolean"},
    },
    "required": ["colour", "count", "name", "ok"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def json_schema(schema: object) -> Grammar:
    """A JSON Schema, written out."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex(source: str) -> Grammar:
    """A regular expression."""
    return Grammar(GrammarKind.REGEX, source)


def lark(source: str) -> Grammar:
    """A Lark grammar."""
    return Grammar(GrammarKind.LARK, source)


GRAMMARS = (
    json_schema(PERSON),
    json_schema(TREE),
    regex(r"(ab|a|[0-9]{2,5}x?)+(foo|bar)?"),
    regex(r".*what[a-c]{1,9}"),
    regex("a|ab|abc{0,5}"),
    lark('start: x (" " x)*\nx: "(" x ")" | /[a-z]{1,3}/'),
    lark('start: word "!"\nword[lazy]: /[a-z ]+it/'),
    lark('start: "a" "b" "c"+\n%ignore / {1,3}/'),
)


def check_person(text: str) -> None:
    """Raises unless the text is JSON that the schema PERSON takes."""
    person = json.loads(text)
    assert list(person) == ["colour", "count", "name", "ok"]
    assert person["colour"] in COLOURS
    assert type(person["count"]) is int
    assert 3 <= person["count"] <= 120
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 6
    assert isinstance(person["ok"], bool)

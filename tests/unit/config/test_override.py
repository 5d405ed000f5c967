"""An override sets one value and leaves all others as they were."""

import json

from hypothesis import given
from hypothesis import strategies as st

from lanewise.config.override import Override, apply_overrides

NAMES = st.text(alphabet="abc", min_size=1, max_size=2)
PLAIN = st.none() | st.booleans() | st.integers() | st.text(alphabet="ab: -1#'")
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(NAMES, PLAIN, max_size=3)


@given(
    tree=st.recursive(PLAIN, lambda below: st.dictionaries(NAMES, below, max_size=3)).filter(
        lambda tree: isinstance(tree, dict)
    ),
    keys=st.lists(NAMES, min_size=1, max_size=4),
    value=VALUES,
)
def test_an_override_sets_its_key_and_leaves_all_others(tree, keys, value):
    before = json.dumps(tree)
    overridden, mistakes = apply_overrides(tree, [Override(".".join(keys), json.dumps(value))])
    assert json.dumps(tree) == before

    expected = json.loads(before)
    section = expected
    for key in keys[:-1]:
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            assert len(mistakes) == 1
            assert overridden == tree
            return
    section[keys[-1]] = value
    assert mistakes == []
    assert overridden == expected

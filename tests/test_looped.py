"""The loop over small cases that the tests use: every case is run, and the one that fails is named."""

from __future__ import annotations

import pytest
import torch

from looped import looped

pytest_plugins = ["pytester"]


def test_every_case_with_numbers_of_its_own() -> None:
    seen = []

    @looped("first", [1, 2])
    @looped(("second", "third"), [("a", "b"), ("c", "d"), ("e", "f")])
    def collect(first: int, second: str, third: str) -> None:
        seen.append((first, second + third, float(torch.rand(()))))

    for _ in range(2):
        torch.manual_seed(7)
        collect()
    assert [case[:2] for case in seen[:6]] == [(first, both) for first in (1, 2) for both in ("ab", "cd", "ef")]
    assert len({number for _, _, number in seen[:6]}) == 6
    assert seen[6:] == seen[:6]


def test_the_case_that_fails_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from looped import looped

        @pytest.fixture
        def limit():
            return 2

        @pytest.mark.parametrize("kind", ["x", "y"])
        @looped("name", ["a", "b"])
        @looped("size", [1, 2, 3])
        def test_small(limit, kind, name, size):
            assert size <= limit or kind == "x"

        @looped("error", [KeyError, ValueError])
        def test_raises(error):
            with pytest.raises(KeyError):
                if error is KeyError:
                    raise error

        @looped(
            "make",
            [
                lambda: 1,
                lambda: "x" * 1000,
            ],
        )
        def test_functions(make):
            assert make() == 1

        @looped("size", [1, 2])
        def test_skips(size):
            if size == 2:
                pytest.skip("no")
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        [
            "*assert (3 <= 2*",
            "*case: size = 3",
            "*case: name = 'a'",
            "*case: error = <class 'ValueError'>",
            "*case: make = <lambda> of line 24",
            "*leave it out of the list*",
        ]
    )


def test_no_cases_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="cases of size: got none"):
        looped("size", [])

"""The kit passes sound plugins and fails unsound ones."""

from __future__ import annotations

import pytest
from toy_codecs import Codecs

from polyshard_testing import PluginConformance
from polyshard_testing.runs import Factory


class TestCodecs(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return Codecs


def test_forgetting_the_fixture_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from polyshard_testing import PluginConformance

        class TestForgetful(PluginConformance):
            pass
        """
    )
    result = pytester.runpytest("-k", "clean", "-p", "polyshard_testing.fixtures")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*TestForgetful must override the fixture 'factory'*"])

"""GPU profiles."""

from __future__ import annotations

import re

import pytest

from replayssm_orch.configs.errors import ConfigError
from replayssm_orch.configs.targets import load_target, target_names


@pytest.mark.parametrize("name", target_names())
def test_every_profile_is_complete(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert re.fullmatch(r"sm_\d+a", target.arch)
    assert 0 < target.multiprocessors < 1000
    assert target.shared_memory_per_multiprocessor % 1024 == 0
    assert 2**30 < target.memory < 2**40


def test_the_h200_profile_is_what_the_card_reports() -> None:
    target = load_target("h200")
    assert (target.arch, target.multiprocessors, target.shared_memory_per_multiprocessor) == ("sm_90a", 132, 233472)


def test_an_unknown_profile_lists_the_profiles() -> None:
    with pytest.raises(ConfigError, match=r"--target h2O: unknown GPU profile .*profiles are h100-sxm, .*rtx-pro-6000"):
        load_target("h2O")

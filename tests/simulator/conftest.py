"""Fixtures that several tests of the pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from odb_sim.studies import bands

from tests.helpers.browser import Tab, find_browser, open_tab


@pytest.fixture(scope="module")
def shared_tab() -> Iterator[Tab]:
    """Yields a browser tab that all tests of a file share."""
    pytest.importorskip("playwright")
    if find_browser() is None:
        pytest.skip("there is no Chromium here")
    with open_tab() as tab:
        yield tab


@pytest.fixture
def tab(shared_tab: Tab) -> Iterator[Tab]:
    """Yields a browser tab, of which no page of the test may complain."""
    yield shared_tab
    assert shared_tab.complaints == []


@pytest.fixture(autouse=True)
def brief_bands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes bands from a small part of an epoch, because they take some twenty simulations in most commands."""
    if request.path.name != "test_bands.py":
        monkeypatch.setattr(bands, "LARGEST_BANDED", 100)
        monkeypatch.setattr(bands, "LARGEST_EVENTS", 100)

"""Forked programs have the environment of a shell."""

from pathlib import Path

import pytest
from support import forked_programs


def test_a_program_does_not_see_what_a_test_s_own_ray_set_but_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said.py").write_text("import os; print(os.environ.get('RAY_AUTH_MODE'), os.environ.get('OF_THE_TEST'))")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as ray.init does, when the server of the programs has read another
    monkeypatch.setenv("OF_THE_TEST", "there")
    assert forked_programs.run("said.py", cwd=tmp_path).stdout == "None there\n"
    assert forked_programs.run("said.py", cwd=tmp_path, RAY_AUTH_MODE="token").stdout == "token there\n"


SAYS = "from ray._raylet import AuthenticationMode, get_authentication_mode\nprint(get_authentication_mode() == AuthenticationMode.TOKEN)"


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_ray_in_a_forked_program_has_the_programs_own_settings(mode: str, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    said = forked_programs.run(str(tmp_path / "says.py"), cwd=tmp_path, RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN="a" * 64)
    assert said.stdout == f"{mode == 'token'}\n", said.stderr

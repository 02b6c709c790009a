"""Which version is the champion: gates, comparisons in the same worlds, and a person's hand."""

import json

import pytest
from registered import (
    SCORES,
    champion,
    set_gate,
    tags,
    versions,
    write_agent,
    write_returns,
)

from hamlet import registry, tracking
from hamlet.artifacts import HamletError, write_json
from stages import register


def test_a_new_version_takes_the_alias_only_if_it_is_no_worse_in_the_same_worlds(repo, capsys):
    register.main()
    assert tags(1)["promoted"].startswith("yes: passed its gate, and no version was champion")
    assert tags(1)["score"] == "400.5"
    # Worse on average, better in two of the four worlds.
    write_agent(repo, 2.0)
    write_returns(repo, 4, -3, -5, 2)
    register.main()
    assert set(versions()) == {1, 2}
    assert champion() == 1
    said = "return is 0.5 lower than of version 1 in the same 4 cases (95 % from -4.619 to +3.619)"
    assert tags(2)["promoted"] == f"no: {said}"
    told = tracking.client().get_model_version("hamlet-agent", "2").description
    assert told.startswith("score 400.5, ")
    assert told.endswith(f"Not champion: {said}.")
    assert f"version 2, new, is not champion: {said}" in capsys.readouterr().out
    # Equal everywhere is no worse.
    write_agent(repo, 3.0)
    write_returns(repo, 0, 0, 0, 0)
    register.main()
    assert champion() == 3
    # Far better, but measured in other worlds: nothing to compare.
    write_agent(repo, 4.0)
    write_returns(repo, 99, 99, 99, 99, rest=150.0)
    register.main()
    assert champion() == 3
    assert tags(4)["promoted"] == (
        "no: version 3 was measured on other held-out cases, so they cannot be compared"
    )


def test_an_old_version_found_again_moves_no_alias(repo):
    """As with an older checkout on a shared server, or `dvc checkout` of an older commit."""
    register.main()
    write_agent(repo, 2.0)
    write_returns(repo, 1, 1, 1, 1)
    register.main()
    assert champion() == 2
    write_agent(repo, 1.0)
    write_returns(repo, 50, 50, 50, 50)
    register.main()
    assert set(versions()) == {1, 2}
    assert champion() == 2


def test_the_alias_stays_where_a_person_put_it(repo, monkeypatch, capsys):
    register.main()
    for weight in (2.0, 3.0):
        write_agent(repo, weight)
        write_returns(repo, weight, weight, weight, weight)
        register.main()
    assert champion() == 3
    assert registry.rollback("hamlet-agent") == (
        "hamlet-agent version 2 is the champion, version 3 no longer"
    )
    assert champion() == 2
    assert tags(2)["promoted"].startswith("yes, by hand (")
    assert tags(3)["promoted"].startswith("no longer: version 2 took its place by hand (")
    for execution in ("first", "later"):  # with stages run, and with nothing to do
        monkeypatch.setenv("HAMLET_EXECUTION", execution)
        capsys.readouterr()
        register.main()
        assert champion() == 2
    assert "version 3, is not champion, version 2 is" in capsys.readouterr().out
    registry.rollback("hamlet-agent")
    assert champion() == 1
    with pytest.raises(HamletError, match="nothing is known of one before"):
        registry.rollback("hamlet-agent")
    registry.rollback("hamlet-agent", 2)
    assert champion() == 2
    assert "version 3 is the champion, version 2 no longer" in registry.promote("hamlet-agent")
    assert champion() == 3
    assert registry.promote("hamlet-agent") == "hamlet-agent version 3 is the champion already"
    with pytest.raises(HamletError, match="has no version 9: it has 1, 2, 3"):
        registry.promote("hamlet-agent", 9)
    with pytest.raises(HamletError, match="no model nobody: it has hamlet-agent, hamlet-p"):
        registry.promote("nobody")
    tracking.client().delete_registered_model_alias("hamlet-agent", "champion")
    register.main()
    assert champion() is None, "taken away by hand"


def test_the_commands_promote_and_roll_back(repo):
    from typer.testing import CliRunner

    from hamlet.cli import app

    register.main()
    write_agent(repo, 2.0)
    write_returns(repo, 1, 1, 1, 1)
    register.main()
    done = CliRunner().invoke(app, ["rollback", "hamlet-agent"])
    assert (done.exit_code, done.output) == (
        0, "hamlet-agent version 1 is the champion, version 2 no longer\n"
    )  # fmt: skip
    assert champion() == 1
    assert CliRunner().invoke(app, ["promote", "hamlet-agent", "2"]).exit_code == 0
    assert champion() == 2
    assert CliRunner().invoke(app, ["promote", "hamlet-agent", "7"]).exit_code == 1


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0.0, 0.0, 0.0)),
        ([3.0, 5.0], [1.0, 1.0], (3.0, 3.0 - 1.96, 3.0 + 1.96)),
        ([1.0, 0.0, 2.0], [2.0, 2.0, 2.0], (-1.0, -1.0 - 1.96 / 3**0.5, -1.0 + 1.96 / 3**0.5)),
    ],
)
def test_paired_differences_and_their_interval(new, old, expected):
    assert registry.paired(new, old) == pytest.approx(expected)


def test_the_gate_keeps_the_alias_and_says_why(repo, capsys):
    register.main()
    write_agent(repo, 2.0)
    write_returns(repo, 9, 9, 9, 9)
    weak = SCORES | {"ratio_over_rest": 2.1, "ratio_over_rest_ci95": [1.8, 2.4]}
    write_json(repo / "artifacts/metrics/evaluate.json", weak)
    capsys.readouterr()
    register.main()
    out = capsys.readouterr().out
    assert set(versions()) == {1, 2}
    assert champion() == 1
    assert "version 2, new, is not champion: ratio_over_rest is 2.1 (95 % from 1.8 to 2.4)" in out
    assert "the gate asks min 2" in out
    verdict = json.loads((repo / "artifacts/metrics/register.json").read_text())
    assert verdict["passed"] is False
    assert len(verdict["reasons"]) == 1
    # A champion that would no longer pass keeps the alias, which is said.
    set_gate(repo, 5.0)
    write_agent(repo, 1.0)
    register.main()
    assert champion() == 1
    assert "version 1, is the champion, but its gate says: ratio_over_rest" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("limit", "bound", "reason"),
    [
        ("min_mean_return", 450.0, "mean_return is 400.5, the gate asks min 450"),
        ("max_loss", 0.05, "loss is 0.1, the gate asks max 0.05"),
        ("max_value_loss", 0.001, "value_loss is 0.01, the gate asks max 0.001"),
        ("min_goal_entropy", 0.1, "goal_entropy is 0.06, the gate asks min 0.1"),
    ],
)
def test_every_limit_of_the_gate_can_block_and_is_named(repo, limit, bound, reason):
    set_gate(repo, 2.0, **{limit: bound})
    register.main()
    verdict = json.loads((repo / "artifacts/metrics/register.json").read_text())
    assert verdict["reasons"] == [reason]
    assert champion() is None


@pytest.mark.parametrize(
    ("limits", "scores", "reasons"),
    [
        ({"min_x": 2}, {"x": 2.0}, 0),
        ({"min_x": 2}, {"x": 1.9}, 1),
        ({"min_x": 2}, {"x": 9, "x_ci95": [1.9, 12]}, 1),
        ({"max_x": 2}, {"x": 1, "x_ci95": [0.5, 2.5]}, 1),
        ({"max_x": 2, "min_x": 0}, {"x": 1, "x_ci95": [0.5, 1.5]}, 0),
        ({"min_x": 2, "min_y": 1}, {}, 2),
        ({"min_x": 2}, {"x": None}, 1),
    ],
)
def test_the_gate_asks_the_near_end_of_the_interval(limits, scores, reasons):
    assert len(register.gate(limits, scores)) == reasons

"""One table of settings, and everybody who takes them: arguments, flags, environment."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Unpack, get_args

import fanin
import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import _settings
from fanin._settings import Settings, flag, variable
from fanin.torch.backend.options import settings_of
from fanin.torch.rendezvous.membership import new_job
from ranks import DEADLINE, Me
from torch._C import _distributed_c10d as c10d

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "settings.md"
NAMES = [row.name for row in fields(Settings)]

# A value of each setting that is not its default.
OTHER: dict[str, Any] = {
    "switch": "10.0.0.9:4800",
    "job": "gpt",
    "in_flight": 17,
    "sub_models": "1000,250000",
    "wire_dtype": "int8",
    "security": "encrypt",
    "protocol": "atp",
    "loss_bound": 0.01,
    "paths": 8,
    "congestion_control": False,
    "trace": "trace.json",
    "page": "10.0.0.1:4880",
    "plan": "own",
    "rate": 2_500_000_000,
    "machine": "left",
    "tls_ca": "ca.pem",
    "secret_file": "secret",
}
# And text that none of them may have.
WRONG: dict[str, Any] = {
    "switch": "",
    "job": "a\nb",
    "in_flight": "many",
    "sub_models": "1000,0",
    "wire_dtype": "fp8",
    "security": "none",
    "protocol": "tcp",
    "loss_bound": "1",
    "paths": "17",
    "congestion_control": "off",
    "trace": "/",
    "page": "here",
    "plan": "ring",
    "rate": "fast",
    "machine": "a\nb",
    "tls_ca": "/",
    "secret_file": "/",
}


# The settings that not every protocol knows.
OF = {
    "wire_dtype": ("switchml",),
    "loss_bound": ("switchml",),
    "paths": ("switchml",),
    "sub_models": ("goat",),
    "congestion_control": ("atp", "goat"),
    "plan": ("switchml",),
}
PROTOCOLS = ("switchml", "atp", "goat")


def others(protocol: str) -> dict[str, Any]:
    """Of each setting that the protocol knows a value, which is not its default."""
    known = {name: value for name, value in OTHER.items() if protocol in OF.get(name, PROTOCOLS)}
    return known | {"protocol": protocol}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(variable(name), raising=False)


def text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_goes_before_the_environment_and_that_before_the_default(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in OF:
        monkeypatch.setenv("FANIN_PROTOCOL", OF[name][0])
    default = getattr(Settings(), name)
    assert getattr(Settings.of(), name) == default
    for blank in ("", "  "):
        monkeypatch.setenv(variable(name), blank)
        assert getattr(Settings.of(), name) == default
    monkeypatch.setenv(variable(name), f" {text(OTHER[name])}\t")
    assert getattr(Settings.of(), name) == OTHER[name]
    if default is not None:
        assert getattr(Settings.of(**{name: default}), name) == default
    else:
        monkeypatch.setenv(variable(name), WRONG[name])
        assert getattr(Settings.of(**{name: OTHER[name]}), name) == OTHER[name]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_wrong_is_refused_with_where_it_was_said(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*: it must "):
        Settings.of(**{name: WRONG[name]})
    if WRONG[name]:
        monkeypatch.setenv(variable(name), WRONG[name])
        with pytest.raises(ValueError, match=f"^{variable(name)} is .*: it must "):
            Settings.of()


@pytest.mark.parametrize("name", OF)
def test_a_setting_that_the_protocol_does_not_know_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = next(protocol for protocol in PROTOCOLS if protocol not in OF[name])
    monkeypatch.setenv("FANIN_PROTOCOL", other)
    own = ", ".join(each for each in OF if other in OF[each])
    of = " and ".join(OF[name])
    said = f"is '{text(OTHER[name])}': it is a setting of {of}, and the protocol is {other}"
    instead = (
        "adds integers, and makes them of floats by a factor of its own, which travel as they are "
        "or as bfloat16"
    )
    which = instead if name == "wire_dtype" else f"has {own}"
    with pytest.raises(ValueError, match=f"^{name} {said}, which {which}: leave it out$"):
        Settings.of(**{name: OTHER[name]})
    monkeypatch.setenv(variable(name), text(OTHER[name]))
    with pytest.raises(ValueError, match=f"^{variable(name)} {said}"):
        fanin.torch.Options()
    parser = argparse.ArgumentParser()
    _settings.add_flags(parser)
    yes_or_no = isinstance(OTHER[name], bool)
    said_by_flag = [f"--no-{flag(name)[2:]}"] if yes_or_no else [flag(name), text(OTHER[name])]
    flags = parser.parse_args(said_by_flag)
    with pytest.raises(ValueError, match=f"^{flag(name)} {said}"):
        Settings.of_flags(flags)
    monkeypatch.setenv("FANIN_PROTOCOL", "tcp")
    with pytest.raises(ValueError, match=r"^FANIN_PROTOCOL is 'tcp'"):
        Settings.of()


def test_a_rate_is_text_with_a_unit_or_a_number_of_bits_a_second(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, bps in (("1gbit", 10**9), (" 1000000000 ", 10**9), (10**9, 10**9), ("1000", 1000)):
        assert Settings.of(rate=said).rate == bps
    for said in ("10", 10, "999bit"):
        with pytest.raises(ValueError, match=r"^rate is .*: it must .*at least 1kbit"):
            Settings.of(rate=said)
    monkeypatch.setenv("FANIN_RATE", " 1000000000")
    told = [finding["message"] for finding in doctor(switch)]
    assert "rate=1000000000bit: FANIN_RATE says so" in told


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="no setting 'slot'"):
        Settings.of(slot=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("exact", True, "floats travel as they are unless wire_dtype (FANIN_WIRE_DTYPE) says"),
        ("own_services", False, "plan=switch (FANIN_PLAN=switch) is what own_services=0 was"),
        ("slots", 17, "write in_flight (FANIN_IN_FLIGHT) instead"),
        ("window", 17, "write in_flight (FANIN_IN_FLIGHT) instead"),
    ],
)
def test_what_was_a_setting_once_is_refused_with_the_cure(
    name: str, value: Any, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for takes in (fanin.torch.Options, partial(fanin.connect, rank=0, world_size=1)):
        with pytest.raises(TypeError, match=f"'{name}' any more: {re.escape(cure)}"):
            takes(**{name: value})
    parser = argparse.ArgumentParser(exit_on_error=False)
    _settings.add_flags(parser)
    for said in (flag(name), f"--no-{flag(name)[2:]}", f"{flag(name)}=17"):
        now = "write --|leave it out: "
        with pytest.raises(
            argparse.ArgumentError, match=f"no flag any more, ({now}).*{re.escape(cure)}"
        ):
            parser.parse_args([said])
    monkeypatch.setenv(variable(name), "1")
    with pytest.raises(ValueError, match=f"^{variable(name)} is '1': {re.escape(cure)}"):
        fanin.torch.Options()
    monkeypatch.setenv(variable(name), "")
    assert fanin.torch.Options(wire_dtype="native").settings.travels_as == "native"


@pytest.mark.parametrize("protocol", ["atp", "goat"])
def test_floats_travel_as_they_are_unless_the_protocol_has_integers(protocol: Any) -> None:
    assert Settings.of().travels_as == "native"
    assert Settings.of(protocol=protocol).travels_as == "integers"
    for wire_dtype in get_args(_settings.WireDtype):
        assert Settings.of(wire_dtype=wire_dtype).travels_as == wire_dtype
        if wire_dtype == "bfloat16":
            settings = Settings.of(protocol=protocol, wire_dtype=wire_dtype)
            assert settings.travels_as == "bfloat16"
            continue
        with pytest.raises(
            ValueError, match=r"switchml, .* which adds integers, and makes them of"
        ):
            Settings.of(protocol=protocol, wire_dtype=wire_dtype)


def test_options_survive_as_text() -> None:
    for protocol in PROTOCOLS:
        said = others(protocol)
        settings = Settings.of(**said)
        assert all(getattr(settings, name) == value for name, value in said.items())
        assert Settings.decode(settings.encode()) == settings
        copy = c10d.Backend.Options(fanin.torch.Options(**said).backend)
        assert settings_of(copy) == settings
    assert Settings.decode(Settings().encode()) == Settings()
    assert settings_of(c10d.Backend.Options("gloo")) is None


def test_connect_options_and_hook_take_every_setting() -> None:
    said = set(_settings.Said.__annotations__) | {"switch"}
    assert said == set(NAMES) == set(OTHER)
    for takes in (fanin.connect, fanin.torch.Options, fanin.torch.HookState):
        parameters = inspect.signature(takes).parameters
        assert "switch" in parameters
        (rest,) = (p for p in parameters.values() if p.kind is p.VAR_KEYWORD)
        assert rest.annotation in ("Unpack[Said]", Unpack[_settings.Said])


def test_a_setting_on_its_way_is_named_by_its_table_and_by_the_binding_alone() -> None:
    files = [*(ROOT / "python").rglob("*.py*"), *(ROOT / "crates/python/src").glob("*.rs")]
    texts = {
        str(file.relative_to(ROOT)): file.read_text() for file in files if file.suffix != ".pyc"
    }
    # One that ranks agree on, and one of each rank: two that nothing in Python uses.
    for name in ("in_flight", "congestion_control"):
        naming = {path for path, text in texts.items() if re.search(rf"\b{name}\b", text)}
        of_binding = {"crates/python/src/settings.rs", "python/fanin/_fanin.pyi"}
        assert naming == {"python/fanin/_settings.py", *of_binding}


SHOW = """
import os
print({n: v for n, v in os.environ.items() if n.startswith("FANIN_")})
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fanin", "run", *arguments]
    return subprocess.run(command, timeout=DEADLINE, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_run_takes_every_setting_and_hands_it_on(tmp_path: Path, protocol: str) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    flags = []
    for name, value in others(protocol).items():
        if isinstance(value, bool):
            flags.append(flag(name) if value else flag(name).replace("--", "--no-"))
        else:
            flags += [flag(name), text(value)]
    done = run(*flags, "--nproc-per-node", "1", str(tmp_path / "show.py"))
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == {
        variable(name): text(value) + ("bit" if name == "rate" else "")
        for name, value in others(protocol).items()
    }


def test_run_refuses_what_is_wrong_with_where_it_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = run("--wire-dtype", "fp8", "train.py")
    assert done.returncode == 2
    assert "--wire-dtype is 'fp8': it must be" in done.stderr
    assert "write 10gbit" in run("--rate", "10gbps", "train.py").stderr
    monkeypatch.setenv("FANIN_IN_FLIGHT", "0")
    assert "FANIN_IN_FLIGHT is '0': it must be a number from 1 to" in run("train.py").stderr


def test_the_manual_lists_every_setting_with_its_default_and_its_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\| (.*) \|$", DOCS.read_text(), re.M)
    table = {name: rest for name, *rest in rows}
    assert list(table) == NAMES
    for row in fields(Settings):
        form, default, meaning = table[row.name]
        assert form == row.metadata["form"].replace("|", ", ")
        assert row.default is None or default == text(row.default)
        assert meaning.startswith(row.metadata["meaning"])


def test_a_missing_switch_names_every_place_where_it_can_be_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for _ in range(2):
        with pytest.raises(fanin.errors.SwitchUnreachable) as caught:
            fanin.connect(job="nowhere", rank=0, world_size=2)
        for place in (
            "rendezvous=HOST:PORT",
            "fanin run",
            "FANIN_SWITCH=HOST:PORT",
            'switch="HOST:PORT"',
            'runtime_env={"env_vars": {"FANIN_SWITCH": "HOST:PORT"}}',
        ):
            assert place in str(caught.value)
        monkeypatch.setitem(sys.modules, "ray", None)


def test_connect_without_a_job_says_where_to_name_it(switch: str) -> None:
    with pytest.raises(ValueError, match="FANIN_JOB"):
        fanin.connect(switch, rank=0, world_size=1)


def test_a_job_has_a_name_that_people_know_and_no_other_run_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py"])
    assert re.fullmatch(r"gpt#[0-9a-f]{8}", new_job("gpt", "0"))
    assert re.fullmatch(r"train#[0-9a-f]{8}", new_job(None, "0"))
    assert re.fullmatch(r"gpt/group-1#[0-9a-f]{8}", new_job("gpt", "1"))
    assert re.fullmatch(r"gpt/group-0123abcd#[0-9a-f]{8}", new_job("gpt", "0123abcd" * 5))
    assert len({new_job("gpt", "0") for _ in range(100)}) == 100
    for program, name in (("-c", "python"), ("/x/tool/__main__.py", "tool"), ("", "python")):
        monkeypatch.setattr(sys, "argv", [program])
        assert new_job(None, "0").startswith(f"{name}#")
    longest = new_job("ü" * 100, "f" * 100)
    assert len(longest.encode()) <= 128
    assert longest.endswith(longest[-9:])


def names(me: Me) -> list[str]:
    """The job's names of a default group, a further one and a split one, as each rank has them."""
    os.environ["FANIN_JOB"] = "gpt"
    me.init(pg_options=fanin.torch.Options(switch=me.switch, job="bert"))
    further: Any = dist.new_group()
    split: Any = dist.split_group(None, [[0, 1]])
    groups: list[Any] = [dist.group.WORLD, further, split]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend._channel._client.job for backend in backends]


def test_the_switch_shows_the_jobs_name(launch: Launch) -> None:
    first, second = launch(names, 2).results()
    assert first == second
    for name, shape in zip(first, ("bert", "gpt/group-1", "bert/group-[0-9a-f]{8}"), strict=True):
        assert re.fullmatch(f"{shape}#[0-9a-f]{{8}}", name)


def by_option(me: Me) -> float:
    """All-reduces with a switch that the environment does not name."""
    del os.environ["FANIN_SWITCH"]
    me.init(pg_options=fanin.torch.Options(switch=me.switch))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    return float(tensor.sum())


def test_options_name_the_switch(launch: Launch) -> None:
    assert launch(by_option, 2).results() == [8.0, 8.0]


def test_an_address_is_understood_or_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, meant in (
        ("4900", "127.0.0.1:4900"),
        (" box:1234\t", "box:1234"),
        ("box", "box:4800"),
        ("::1", "[::1]:4800"),
    ):
        monkeypatch.setenv("FANIN_SWITCH", said)
        assert Settings.of().switch == meant
    monkeypatch.setenv("FANIN_SWITCH", "box,4900")
    assert Settings.of().switch == "box:4800,127.0.0.1:4900"
    monkeypatch.setenv("FANIN_SWITCH", "a:4800,a")
    with pytest.raises(ValueError, match=r"^FANIN_SWITCH is 'a:4800,a': it names a switch twice"):
        Settings.of()
    for wrong, cause in (("a,,b", "host name"), ("http://box", "host name"), ("0", "0")):
        monkeypatch.setenv("FANIN_SWITCH", wrong)
        with pytest.raises(ValueError, match=f"^FANIN_SWITCH is '{wrong}': .*HOST:PORT.*{cause}"):
            fanin.connect(job="address", rank=0, world_size=1)


def doctor(switch: str, *flags: str) -> list[dict[str, str]]:
    """The doctor's findings about settings."""
    command = [sys.executable, "-m", "fanin", "doctor", "--json", "--switch", switch, *flags]
    done = subprocess.run(command, timeout=DEADLINE, check=False, capture_output=True, text=True)
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return [finding for finding in findings if finding["check"] == "settings"]


def test_the_doctor_says_who_decided_each_setting(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (defaults,) = doctor(switch)
    for row in fields(Settings):
        assert row.name == "switch" or row.name in defaults["message"]
    assert "wire_dtype=native" in defaults["message"]
    monkeypatch.setenv("FANIN_IN_FLIGHT", "17")
    monkeypatch.setenv("FANIN_WIRE_DTYPE", "fp8")
    monkeypatch.setenv("FANIN_JOB", "gpt")
    said = [finding["message"] for finding in doctor(switch, "--in-flight", "19")]
    assert "in_flight=19: --in-flight says so, which overrules FANIN_IN_FLIGHT=17" in said
    assert "job=gpt: FANIN_JOB says so" in said
    assert any(text.startswith("FANIN_WIRE_DTYPE is 'fp8': it must be") for text in said)
    monkeypatch.delenv("FANIN_WIRE_DTYPE")
    monkeypatch.setenv("FANIN_EXACT", "1")
    monkeypatch.setenv("FANIN_PATHS", "8")
    said = [finding["message"] for finding in doctor(switch, "--protocol", "atp")]
    assert any(text.startswith("FANIN_EXACT is '1': floats travel as they are") for text in said)
    assert any("wire_dtype=integers" in text for text in said), "ATP's own"
    assert any(text.startswith("FANIN_PATHS is '8': it is a setting of switchml") for text in said)


def test_the_doctor_finds_ranks_that_the_switch_would_refuse(switch: str) -> None:
    *_, found = doctor(switch, "--protocol", "atp")
    assert found["verdict"] == "problem"
    assert "protocol=atp, and the switch serves switchml" in found["message"]


def test_every_variable_is_in_the_manual_and_known_to_who_warns() -> None:
    of_switches = {"FANIN_TLS_CERT", "FANIN_TLS_KEY", "FANIN_PAGE_TOKEN_FILE"}
    read = {variable(name) for name in NAMES} | {_settings.AS_VARIABLE, "FANIN_LOG", *of_switches}
    assert set(fanin._fanin.variables) == read
    former = {variable(gone.name): variable(gone.now) for gone in _settings._GONE}
    assert dict(fanin._fanin.former_variables) == former
    assert set(re.findall(r"^\| `(FANIN_\w+)` \|", DOCS.read_text(), re.M)) == read - {
        variable(name) for name in NAMES
    }


ALONE = """
import sys, numpy, fanin
for _ in range(2):
    with fanin.connect(sys.argv[1], job="alone", rank=0, world_size=1) as group:
        group.all_reduce(numpy.ones(1, "f"))
"""


def alone(switch: str, **variables: str) -> str:
    """What a rank without others says on stderr; it joins twice."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, switch],
        env=os.environ | variables,
        timeout=DEADLINE,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stderr


def test_an_unknown_variable_is_warned_about_once_with_the_nearest_name(switch: str) -> None:
    known = alone(switch)
    assert "FANIN_" not in known
    said = alone(switch, FANIN_SWTICH="a:1", FANIN_PORT_4800_TCP="tcp://10.0.0.1:4800")
    assert re.findall(r"FANIN_\w+", said) == ["FANIN_SWTICH", "FANIN_SWITCH"]
    # If a machine has several ranks, one speaks.
    assert "SWTICH" not in alone(switch, FANIN_SWTICH="a:1", LOCAL_RANK="1")
    command = [sys.executable, "-m", "fanin", "status", "--switch", switch]
    done = subprocess.run(
        command, env=os.environ | {"FANIN_LGO": "1"}, check=True, capture_output=True, text=True
    )
    assert "do you mean FANIN_LOG?" in done.stderr


def test_logs_of_a_rank_reach_stderr_with_its_rank(switch: str) -> None:
    assert "joined" not in alone(switch)
    lines = alone(switch, FANIN_LOG="info", RANK="7").splitlines()
    joined = [line for line in lines if "joined" in line]
    assert len(joined) == 2
    assert all(line.startswith("rank 7: ") and "alone" in line for line in joined)
    assert "joined" not in alone(switch, FANIN_LOG="fanin_udp=debug")


def test_a_wrong_filter_is_refused_with_its_name(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANIN_LOG", "fanin=loud")
    with pytest.raises(ValueError, match='FANIN_LOG is "fanin=loud": it must be a filter'):
        fanin.connect(switch, job="loud", rank=0, world_size=1)


def without(module: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where a package is not installed."""
    hide = f"import runpy, sys; sys.modules[{module!r}] = None; "
    return subprocess.run(
        [sys.executable, "-c", hide + command[0], *command[1:]],
        timeout=DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )


FANIN = "runpy.run_module('fanin', run_name='__main__')"


@pytest.mark.parametrize(
    ("module", "command", "cure"),
    [
        ("torch", (FANIN, "run", "train.py"), 'pip install "torch>=2.14" numpy'),
        ("torch", ("import fanin.torch",), 'pip install "torch>=2.14" numpy'),
        ("numpy", ("import fanin; fanin.connect",), "pip install numpy"),
        # No index has these two wheels, and what one has under their names is anybody's.
        ("fanin_lab", (FANIN, "bench", "allreduce"), "pip install target/wheels/fanin_lab-"),
        ("fanin_lab", (FANIN, "netlab", "status"), "pip install target/wheels/fanin_lab-"),
        ("fanin_lab", (FANIN, "reproduce", "atp"), "pip install target/wheels/fanin_lab-"),
        ("matplotlib", (FANIN, "reproduce", "atp"), "pip install matplotlib"),
    ],
)
def test_a_missing_extra_ends_in_one_line_that_says_what_to_install(
    module: str, command: tuple[str, ...], cure: str
) -> None:
    done = without(module, *command)
    assert done.returncode == 1
    assert cure in done.stderr.splitlines()[-1]
    if command[0] == FANIN:
        assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("module", ["fanin.launch", "fanin._settings"])
def test_a_module_that_no_extra_brings_is_a_fault_with_its_traceback(module: str) -> None:
    done = without(module, FANIN, "run", "train.py")
    assert done.returncode == 1
    assert "pip install" not in done.stderr
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: ")

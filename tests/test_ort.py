"""One healthy ONNX Runtime, checked files, providers that really run."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hamlet.artifacts import HamletError, write_card
from hamlet.ort import check_runtime, installed_runtimes, open_session, open_unchecked

ROOT = Path(__file__).parents[1]
SCHEMA = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 2]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 2]}],
}


def doubling() -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "doubling", [x], [y])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "agent.onnx"
    onnx.save(doubling(), path)
    write_card(path, "agent", SCHEMA)
    return path


def test_a_checked_file_opens_and_runs(model):
    session = open_session(str(model))
    x = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], 2 * x)
    assert session.get_providers()[-1] == "CPUExecutionProvider"
    assert session.get_session_options().intra_op_num_threads == 1


def test_a_changed_file_is_not_opened(model):
    model.write_bytes(model.read_bytes() + b"\0")
    with pytest.raises(HamletError, match="does not match its card"):
        open_session(model)
    model.with_name("agent.onnx.json").unlink()
    with pytest.raises(HamletError, match=r"agent\.onnx\.json is missing"):
        open_session(model)


def test_a_file_that_is_no_model_is_one_line(model):
    model.write_bytes(b"not a model")
    write_card(model, "agent", SCHEMA)
    with pytest.raises(HamletError, match="cannot be opened by ONNX Runtime") as caught:
        open_session(model)
    assert "\n" not in str(caught.value)


def test_a_provider_that_is_not_there_is_one_line(model):
    with pytest.raises(HamletError, match="has no NoSuchProvider: ask for one of"):
        open_session(model, providers=["NoSuchProvider"])


@pytest.mark.skipif(sys.platform != "linux", reason="asks for the Linux driver")
def test_cuda_is_used_only_where_it_runs(tmp_path):
    """A list of available providers names CUDA on machines without it; nothing may be printed."""
    path = tmp_path / "m.onnx"
    path.write_bytes(doubling().SerializeToString())
    code = (
        "import sys; from hamlet.ort import open_unchecked\n"
        "s = open_unchecked(sys.argv[1])\nprint(s.get_providers()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    driver = Path("/proc/driver/nvidia/version").exists()
    if not driver:
        assert done.stdout == "CPUExecutionProvider\n"
    assert done.stderr == ""


def test_the_installed_runtime_is_healthy():
    name, version = check_runtime()
    assert {name: version} == installed_runtimes()


def in_environment(folder, *names):
    """Run check_runtime where also these distributions are installed, as pip records them."""
    for name in names:
        info = folder / f"{name.replace('-', '_')}-1.19.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.19.0\n")
    code = (
        "from hamlet.artifacts import HamletError\nfrom hamlet.ort import check_runtime\n"
        "try:\n    print(check_runtime())\nexcept HamletError as e:\n    print(e)"
    )
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_two_runtimes_together_are_named_with_the_command_that_mends_it(tmp_path):
    ((name, version),) = installed_runtimes().items()
    other = "onnxruntime" if name != "onnxruntime" else "onnxruntime-gpu"
    said = in_environment(tmp_path, other)
    assert "\n" not in said
    assert f"{name} {version}" in said
    assert f"{other} 1.19.0" in said
    assert "corrupt each other" in said
    both = " ".join(sorted((name, other)))
    assert f"-m pip uninstall -y {both} && " in said
    assert "-m pip install --no-deps onnxruntime" in said


def test_builds_by_other_names_are_found(tmp_path):
    names = ["ort-nightly-gpu", "onnxruntime-openvino", "onnxruntime-rocm"]
    said = in_environment(tmp_path, *names)
    assert all(f"{name} 1.19.0" in said for name in names)


def test_a_runtime_that_lost_its_files_is_named(tmp_path):
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text("")
    said = in_environment(tmp_path)
    assert "has lost its files" in said
    assert "pip uninstall" in said


def test_other_packages_with_similar_names_do_no_harm(tmp_path):
    name, _ = check_runtime()
    assert name in in_environment(tmp_path, "onnxruntime-extensions", "onnxruntime-tools")


def test_it_needs_neither_torch_nor_numpy_to_import():
    code = "import sys, hamlet.ort; print({'torch', 'numpy', 'onnxruntime'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_bytes_can_be_opened():
    session = open_unchecked(doubling().SerializeToString(), ["CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"]

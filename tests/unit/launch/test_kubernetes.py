import dataclasses
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.utils import macros

from lanewise.config import DistributedConfig, RunConfig
from lanewise.config.load import dump_config, load_config
from lanewise.launch.kubernetes import CONFIG_FILE, manifest

TRAIN = ("train", CONFIG_FILE, "--resume")
KINDS = ("TrainJob", "JobSet")
MODELS = {
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
}
SECRET = "hunter2"


def config_of(kubernetes=(), run_dir="/data/runs/Digits_1", **distributed) -> RunConfig:
    return RunConfig(
        task={"class_path": "digits.Digits"},
        batch={"global_batch_size": 64, "micro_batch_size": 2},
        train={"max_steps": 4, "run_dir": run_dir},
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        distributed=DistributedConfig(
            launcher="kubernetes",
            kubernetes={"image": "registry/digits:1", **dict(kubernetes)},
            **distributed,
        ),
    )


EVERYTHING = {
    "namespace": "n",
    "claims": {"shared": "/data", "more": "/more"},
    "resources": {"cpu": 8, "memory": "64Gi"},
    "secrets": ["wandb"],
}


def print_manifest(config: RunConfig, program=TRAIN) -> str:
    return manifest(config, program, dump_config(config))


def documents(config: RunConfig, program=TRAIN) -> dict:
    return {document["kind"]: document for document in yaml.safe_load_all(print_manifest(config, program))}


def job_set(config: RunConfig, program=TRAIN) -> dict:
    found = documents(config, program)
    return (
        found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
    )


def job(config: RunConfig) -> dict:
    return job_set(config)["replicatedJobs"][0]["template"]["spec"]


def pod(config: RunConfig, program=TRAIN) -> dict:
    return job_set(config, program)["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def container(config: RunConfig, program=TRAIN) -> dict:
    (found,) = pod(config, program)["containers"]
    return found


def limits(**distributed) -> dict:
    return container(config_of(**distributed)).get("resources", {}).get("limits", {})


def is_known(document: dict) -> bool:
    """Tell whether the API has every key of a document: the models drop those that it lacks."""
    models = import_module("kubeflow_trainer_api.models")  # which takes a second
    return getattr(models, MODELS[document["kind"]]).from_dict(document).to_dict() == document


@pytest.mark.parametrize("kubernetes", [{}, EVERYTHING])
@pytest.mark.parametrize("kind", KINDS)
def test_the_api_has_every_key(kind, kubernetes):
    config = config_of({"kind": kind, **kubernetes}, nodes=2, devices=4, device_type="cuda")
    found = documents(config)
    expected = ["ConfigMap", "TrainingRuntime", "TrainJob"] if kind == "TrainJob" else ["ConfigMap", "JobSet"]
    assert list(found) == expected
    assert all(map(is_known, found.values()))


def test_a_misspelt_key_is_none_of_the_api():
    found = documents(config_of())
    spec = found["TrainingRuntime"]["spec"]["template"]["spec"]
    (inner,) = spec["replicatedJobs"]
    inner["template"]["spec"]["podFailurePolicies"] = inner["template"]["spec"].pop("podFailurePolicy")
    assert not is_known(found["TrainingRuntime"])
    found["TrainJob"]["spec"]["trainer"]["numProcsPerNode"] = 1
    assert not is_known(found["TrainJob"])


def test_a_train_job_refers_to_the_runtime_before_it():
    found = documents(config_of({"namespace": "team"}, nodes=2, devices=4))
    assert {document["metadata"]["namespace"] for document in found.values()} == {"team"}
    assert found["TrainJob"]["spec"] == {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": found["TrainingRuntime"]["metadata"]["name"],
        },
        "trainer": {"numNodes": 2, "numProcPerNode": 4},
    }
    assert "PET" not in str(found)  # Kubeflow sets them


def test_the_pods_of_a_job_set_meet_at_the_first():
    config = config_of({"kind": "JobSet"}, nodes=2, devices=4)
    name = documents(config)["JobSet"]["metadata"]["name"]
    assert (job(config)["completions"], job(config)["completionMode"]) == (2, "Indexed")
    variables = {entry["name"]: entry.get("value") for entry in container(config)["env"]}
    assert variables["PET_MASTER_ADDR"] == f"{name}-node-0-0.{name}"
    assert (variables["PET_NNODES"], variables["PET_NPROC_PER_NODE"]) == ("2", "4")
    (rank,) = [entry for entry in container(config)["env"] if entry["name"] == "PET_NODE_RANK"]
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_ends_the_run_and_a_preempted_pod_comes_again(kind):
    config = config_of({"kind": kind}, max_restarts=3)
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job(config)["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [2], "Ignore": [75]}
    assert pod(config)["restartPolicy"] == "Never"  # which podFailurePolicy needs
    policy = job_set(config)["failurePolicy"]
    assert policy["maxRestarts"] == 3
    assert policy["rules"][0]["action"] == "FailJobSet"


def test_a_pod_has_time_to_save():
    longer = dataclasses.replace(config_of(), checkpoint={"preempt_seconds": 299.5})
    (variable,) = container(longer)["env"]
    assert variable == {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "360"}
    assert pod(longer)["terminationGracePeriodSeconds"] == 390


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_a_variable_is_printed(kind):
    config = config_of({"kind": kind, "secrets": ["wandb"]}, ssh={"variables": {"KEY": SECRET}})
    assert SECRET in dump_config(config)
    assert SECRET not in print_manifest(config)
    assert container(config)["envFrom"] == [{"secretRef": {"name": "wandb"}}]


def test_the_pods_read_the_configuration_without_its_launcher(tmp_path: Path):
    config = config_of(EVERYTHING, nodes=2, host_seconds=5, devices=4, max_restarts=1)
    text = documents(config)["ConfigMap"]["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(text)
    read = load_config(str(tmp_path / "config.yaml"))
    assert read.distributed == DistributedConfig(devices=4, max_restarts=1)
    assert dataclasses.replace(read, distributed=config.distributed, search_path=None) == config
    mounts = {mount["name"]: mount["mountPath"] for mount in container(config)["volumeMounts"]}
    assert f"{mounts['configuration']}/config.yaml" == CONFIG_FILE


def test_arguments_reach_the_program_as_they_are():
    arguments = (
        "$(HOME)",
        "$x",
        "two words",
        "a'b\"c",
        "yes",
        "n",
        "1e3",
        "0x10",
        "null",
        "--a=b: c",
        "#",
        "ä",
    )
    command = container(config_of(), (*TRAIN, *arguments))["command"]
    assert command[:3] == ["python", "-m", "lanewise.launch.torchrun"]
    assert "$(" not in "".join(command).replace("$$", "")  # else Kubernetes puts a variable's value there
    in_pod = [word.replace("$$", "$") for word in command]
    assert macros.substitute(in_pod, "0")[-len(arguments) :] == list(arguments)


def test_text_that_kubectl_reads_as_something_else_is_quoted():
    printed = print_manifest(config_of({"namespace": "n"}), ("1e3", "y"))
    assert 'namespace: "n"' in printed
    assert '- "1e3"' in printed
    assert '- "y"' in printed


def test_claims_are_mounted_in_each_pod():
    config = config_of({"claims": {"shared": "/data"}})
    (volume,) = [entry for entry in pod(config)["volumes"] if "persistentVolumeClaim" in entry]
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
    assert {"name": volume["name"], "mountPath": "/data"} in container(config)["volumeMounts"]


@pytest.mark.parametrize(
    ("distributed", "expected"),
    [
        ({}, {}),
        ({"devices": 4}, {}),
        ({"device_type": "cpu", "devices": 4}, {}),
        ({"device_type": "cuda"}, {"nvidia.com/gpu": "1"}),
        ({"device_type": "cuda", "devices": 4}, {"nvidia.com/gpu": "4"}),
        ({"devices": ("cuda:0", "cuda:0", "cuda:1")}, {"nvidia.com/gpu": "2"}),
        ({"device_type": "cuda", "devices": 4, "reducer": "data_parallel"}, {"nvidia.com/gpu": "4"}),
        ({"device_type": "cuda", "kubernetes": {"resources": {"amd.com/gpu": 2}}}, {"amd.com/gpu": "2"}),
        (
            {"device_type": "cuda", "kubernetes": {"resources": {"cpu": 0.5}}},
            {"nvidia.com/gpu": "1", "cpu": "0.5"},
        ),
    ],
)
def test_a_pod_asks_for_a_gpu_for_each_device(distributed, expected):
    assert limits(**distributed) == expected


@pytest.mark.parametrize(
    ("kubernetes", "run_dir", "device_type", "warnings"),
    [
        ({"claims": {"shared": "/data"}}, "/data/run", "cuda", ()),
        ({"claims": {"shared": "/data/"}}, "/data/run", "cpu", ()),
        ({"claims": {"shared": "/data"}}, "/database/run", "cpu", ("/database/run is in none",)),
        ({}, "runs/a", "auto", ("runs/a is in none", "ask for no GPU")),
        ({"claims": {"shared": "/data"}, "resources": {"amd.com/gpu": 1}}, "/data/run", "auto", ()),
    ],
)
def test_a_comment_says_what_is_missing(kubernetes, run_dir, device_type, warnings):
    printed = print_manifest(config_of(kubernetes, run_dir, device_type=device_type))
    comments = [line for line in printed.splitlines() if line.startswith("#")][3:]
    assert len(comments) == len(warnings)
    assert all(warning in line for warning, line in zip(warnings, comments, strict=True))


@pytest.mark.parametrize(
    ("run_dir", "name"),
    [
        ("runs/Digits_1", "lanewise-runs-digits-1"),
        ("/data/runs/digits/", "lanewise-data-runs-digits"),
        (".", "lanewise"),
        ("a" * 80, f"lanewise-{'a' * 31}"),
    ],
)
def test_a_run_is_named_after_its_folder(run_dir, name):
    assert documents(config_of(run_dir=run_dir))["ConfigMap"]["metadata"]["name"] == name

"""Writes the manifests of a run for Kubernetes: a TrainJob of Kubeflow Trainer, or a JobSet.

Both start a Job whose pods are the hosts of one world. A TrainJob comes with a TrainingRuntime of its own,
since it cannot itself say what an exit code means, and Kubeflow's runtimes do not say it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import yaml

from lanewise.config import DistributedConfig, RunConfig
from lanewise.config.strict_yaml import read_yaml, write_yaml
from lanewise.errors import ConfigError, PreemptedError
from lanewise.launch.agent import JobFiles, Workers
from lanewise.launch.launcher import Launcher

CONFIG_FILE = "/etc/lanewise/config.yaml"
"""Where the pods find the configuration."""

_KUBEFLOW = "trainer.kubeflow.org"
_NODE = "node"
"""The job and the container of a pod, as Kubeflow names them."""
_PORT = 29500
_LONGEST_NAME = 40
"""The most characters of a name; Kubernetes takes 63, of which a pod's name needs some for its number."""
_SECONDS_OF_A_STEP = 60
"""How long the step may take that ends before the save."""
_SECONDS_TO_END = 30


@final
@dataclass(frozen=True)
class KubernetesLauncher(Launcher):
    """Writes manifests; it is kubectl that submits them."""

    text: str
    """What `manifest` wrote."""

    def run(self, workers: Workers, files: JobFiles) -> NoReturn:
        raise ConfigError(
            "distributed.launcher kubernetes writes manifests, and submits nothing. Add --dry-run, and pipe "
            "the output to: kubectl apply -f -"
        )

    def describe(self) -> str:
        return self.text


def manifest(config: RunConfig, program: Sequence[str], configuration: str) -> str:
    """Write what `kubectl apply -f -` takes.

    Args:
        config: of the run.
        program: what follows `python -m lanewise` in each process, with CONFIG_FILE as its configuration. Let
            it resume, since the cluster starts pods again.
        configuration: the configuration as YAML. It travels without the keys that launchers use.

    Returns:
        Documents of YAML.
    """
    name = _name(config.train.run_dir)
    distributed = config.distributed
    metadata = {"name": name}
    if distributed.kubernetes.namespace is not None:
        metadata["namespace"] = distributed.kubernetes.namespace
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,  # pods that are started again read what the first ones read
        "data": {"config.yaml": _without_launcher(configuration)},
    }
    job_set = _job_set(config, name, program)
    if distributed.kubernetes.kind == "JobSet":
        run = [_document("jobset.x-k8s.io/v1alpha2", "JobSet", metadata, job_set)]
    else:
        run = _train_job(distributed, metadata, job_set)
    return _head(config, name) + yaml.dump_all(
        [files, *run], Dumper=_Dumper, sort_keys=False, explicit_start=True, width=math.inf
    )


def _name(run_dir: str) -> str:
    """Name the run after its folder, as a label of DNS."""
    words = re.sub(r"[^a-z0-9]+", "-", run_dir.lower()).strip("-")
    return f"lanewise-{words[-(_LONGEST_NAME - len('lanewise-')) :]}".replace("--", "-").strip("-")


def _without_launcher(configuration: str) -> str:
    tree = read_yaml(configuration, source="the configuration")
    if not isinstance(tree, dict):
        raise ConfigError(f"the configuration must be a mapping of its sections: got {configuration:.80}.")
    section = tree.get("distributed") or {}
    # Those of ssh may hold secrets.
    kept = {key: value for key, value in section.items() if key not in DistributedConfig.OF_LAUNCHERS}
    return write_yaml({**tree, "distributed": kept})


def _head(config: RunConfig, name: str) -> str:
    """Write comments: how to use the manifests, and what they lack."""
    lines = [
        "Start it: kubectl apply -f FILE",
        f"See it:   kubectl logs -f --prefix -l jobset.sigs.k8s.io/jobset-name={name}",
        "End it:   kubectl delete -f FILE",
    ]
    run_dir = config.train.run_dir
    paths = [path.rstrip("/") for path in config.distributed.kubernetes.claims.values()]
    if not any(run_dir.startswith(f"{path}/") for path in paths):
        lines.append(
            f"train.run_dir {run_dir} is in none of distributed.kubernetes.claims: mount what all pods share "
            "there, or the run is lost with its pods."
        )
    if not _gpus(config.distributed) and config.distributed.device_type != "cpu":
        lines.append(
            "The pods ask for no GPU. Set distributed.device_type, or distributed.kubernetes.resources."
        )
    return "".join(f"# {line}\n" for line in lines)


def _job_set(config: RunConfig, name: str, program: Sequence[str]) -> dict[str, Any]:
    """Return the spec of the JobSet: one Job, with a pod for each host."""
    distributed = config.distributed
    num_pods = distributed.nodes or 1
    job = {
        "parallelism": num_pods,
        "completions": num_pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # of one that failed, all are started again
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exit_code(ConfigError.exit_code)},
                {"action": "Ignore", "onExitCodes": _exit_code(PreemptedError.exit_code)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod(config, name, program)},
    }
    return {
        "failurePolicy": {
            "maxRestarts": distributed.max_restarts,
            "rules": [
                {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
            ],
        },
        "replicatedJobs": [
            {
                "name": _NODE,
                "replicas": 1,
                "template": {
                    # By which Kubeflow knows the job.
                    "metadata": {"labels": {f"{_KUBEFLOW}/trainjob-ancestor-step": "trainer"}},
                    "spec": job,
                },
            }
        ],
    }


def _exit_code(code: int) -> dict[str, Any]:
    return {"containerName": _NODE, "operator": "In", "values": [code]}


def _pod(config: RunConfig, name: str, program: Sequence[str]) -> dict[str, Any]:
    distributed, kubernetes = config.distributed, config.distributed.kubernetes
    seconds_to_save = math.ceil(config.checkpoint.preempt_seconds) + _SECONDS_OF_A_STEP
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds_to_save)}
    # Kubernetes and torchrun both put values in place of $(NAME) and $NAME, and read $$ as $.
    escaped = [word.replace("$", "$$$$") for word in program]
    mounts = {"configuration": CONFIG_FILE.rpartition("/")[0], "shm": "/dev/shm"}  # noqa: S108
    volumes: list[dict[str, Any]] = [
        {"name": "configuration", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # loaders need more than the 64 MiB of a pod
    ]
    for number, (claim, path) in enumerate(kubernetes.claims.items()):
        mounts[f"claim-{number}"] = path
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    container: dict[str, Any] = {
        "name": _NODE,
        "image": kubernetes.image,
        "command": ["python", "-m", "lanewise.launch.torchrun", "-m", "lanewise", *escaped],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    }
    if kubernetes.kind == "JobSet":
        container["env"] += _world(distributed, name)
    if kubernetes.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in kubernetes.secrets]
    if limits := {**_gpus(distributed), **kubernetes.resources}:
        container["resources"] = {"limits": {key: str(value) for key, value in limits.items()}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": seconds_to_save + _SECONDS_TO_END,
        "containers": [container],
        "volumes": volumes,
    }


def _world(distributed: DistributedConfig, name: str) -> list[dict[str, Any]]:
    """Return the variables that torchrun reads in place of its options; in a TrainJob Kubeflow sets them."""
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    return [
        {"name": "PET_NNODES", "value": str(distributed.nodes or 1)},
        {"name": "PET_NPROC_PER_NODE", "value": str(distributed.num_processes or 1)},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-{_NODE}-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]


def _gpus(distributed: DistributedConfig) -> Mapping[str, object]:
    """Return the accelerators of a pod: those that the resources name, or one for each device."""
    named = {key: value for key, value in distributed.kubernetes.resources.items() if "/" in key}
    devices = set(distributed.device_names)
    is_cuda = distributed.device_type == "cuda" or any(device.startswith("cuda:") for device in devices)
    if named or not is_cuda:
        return named
    return {"nvidia.com/gpu": len(devices) or distributed.num_devices or 1}


def _train_job(
    distributed: DistributedConfig, metadata: Mapping[str, str], job_set: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a TrainJob, and before it the runtime to which it refers."""
    num_nodes = distributed.nodes or 1
    version = f"{_KUBEFLOW}/v1alpha1"
    policy = {"numNodes": num_nodes, "torch": {}}
    reference = {"apiGroup": _KUBEFLOW, "kind": "TrainingRuntime", "name": metadata["name"]}
    trainer = {"numNodes": num_nodes, "numProcPerNode": distributed.num_processes or 1}
    return [
        _document(version, "TrainingRuntime", metadata, {"mlPolicy": policy, "template": {"spec": job_set}}),
        _document(version, "TrainJob", metadata, {"runtimeRef": reference, "trainer": trainer}),
    ]


def _document(
    version: str, kind: str, metadata: Mapping[str, str], spec: Mapping[str, Any]
) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": dict(metadata), "spec": spec}


@final
class _Dumper(yaml.SafeDumper):
    """Writes text so that no reader takes it for something else: kubectl takes `n` for false."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write what is there twice twice."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = len(text) > 1 and text[0].isalpha()
    style = "|" if "\n" in text else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

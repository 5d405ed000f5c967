import pytest

from lanewise.config.hosts import KubernetesConfig
from lanewise.errors import ConfigError


@pytest.mark.parametrize("path", ["data", "", 1, None])
def test_a_claim_has_a_path_in_the_pods(path):
    with pytest.raises(ConfigError, match=r"claims\.shared must be the path where the pods see it: got"):
        KubernetesConfig(claims={"shared": path})
    assert KubernetesConfig(claims={"shared": "/data"}).claims == {"shared": "/data"}


@pytest.mark.parametrize("quantity", [True, None, [8], {"gpu": 1}])
def test_a_resource_has_a_quantity(quantity):
    with pytest.raises(ConfigError, match=r"resources\.cpu must be a quantity such as 8 or 64Gi: got"):
        KubernetesConfig(resources={"cpu": quantity})
    for fits in (8, 0.5, "500m"):
        assert KubernetesConfig(resources={"cpu": fits}).resources == {"cpu": fits}


def test_the_pods_run_in_one_of_two_ways():
    with pytest.raises(ConfigError, match="kind must be one of TrainJob, JobSet: got"):
        KubernetesConfig(kind="Job")

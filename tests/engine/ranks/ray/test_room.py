"""The resources of a Ray cluster that ranks request."""

from quire.engine.ranks.ray.room import Room, advice, lack, room_for


def test_rank_gets_a_gpu_or_an_equal_share_of_the_cpus() -> None:
    cpus = [{"CPU": 8.0}, {"CPU": 8.0, "memory": 1e9}]
    assert room_for(cpus, 2, 1, "auto", None) == Room("CPU", 8, 2)
    assert room_for(cpus, 3, 1, "auto", None) == Room("CPU", 4, 3)
    assert room_for(cpus, 2, 2, "auto", None) == Room("CPU", 4, 2)
    assert room_for([{"CPU": 7.0}, {"CPU": 3.0}], 3, 1, "cpu", None) == Room("CPU", 3, 3)
    assert room_for(cpus, 40, 1, "auto", None) == Room("CPU", 1, 40)
    assert room_for(cpus, 2, 1, "auto", 3) == Room("CPU", 3, 2)
    assert room_for([], 2, 1, "auto", None) == Room("CPU", 1, 2)
    gpus = [*cpus, {"CPU": 8.0, "GPU": 1.0}]
    assert room_for(gpus, 4, 1, "auto", 3) == Room("GPU", 1, 4)
    assert room_for(gpus, 4, 1, "cpu", 3) == Room("CPU", 3, 4)
    assert room_for(cpus, 2, 1, "cuda", None) == Room("GPU", 1, 2)
    assert Room("GPU", 1, 2).bundles == [{"GPU": 1.0}, {"GPU": 1.0}]


def test_error_names_available_and_requested_resources() -> None:
    room = Room("CPU", 4, 3)
    message = lack(room, [{"CPU": 8.0}, {"CPU": 2.5}, {}], [{"CPU": 1.0}])
    assert message == (
        "3 x 4 CPU are requested, and the cluster's 3 nodes have 8 + 2.5 + 0, of which 1 are free"
    )
    assert "QUIRE_NUM_THREADS" in advice(room)
    assert "device='cpu'" in advice(Room("GPU", 1, 2))
    assert "1 node has 0, of which 0" in lack(Room("GPU", 1, 2), [{}], [])

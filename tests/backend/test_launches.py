"""What the host does before each launch of a captured graph."""

from graphmod.backend.lifetime import capturing, launcher, prepare_launches


class Graph:
    def __init__(self, said):
        self.said = said

    def replay(self):
        self.said.append("launched")


def test_what_a_capture_asks_for_is_done_before_each_launch_of_its_graphs():
    said, prepared = [], []

    def prepare(graph):
        prepared.append(graph)
        return (lambda: said.append("copies")) if len(prepared) == 1 else None

    with capturing():
        for _ in range(2):  # by several layers
            prepare_launches(prepare)
        first, second = Graph(said), Graph(said)
        launches = [launcher(graph) for graph in (first, second)]
    assert prepared == [first, second] and not said
    for launch in (launches[0], launches[1], launches[0]):
        launch()
    assert said == ["copies", "launched", "launched", "copies", "launched"]


def test_the_next_capture_knows_nothing_of_it():
    def prepare(graph):
        raise AssertionError

    with capturing():
        prepare_launches(prepare)
    with capturing():
        launcher(Graph([]))

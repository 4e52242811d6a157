"""The contract of an engine, run on every engine, in float32 on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from estr_lite.rollout.engine import Engine, Finished, Sampling, version_at
from estr_lite.rollout.worker import Canary, CanaryError
from tests.lab import Lab, rescore

TOLERANCE = 1e-4  # nats
SAMPLING = Sampling(temperature=1.0, max_tokens=24, rollouts=4)
SWAPPED = ((0, 1), (3, 2), (7, 4))  # segments: (start, version)


def errors(lab: Lab, finished: list[Finished], kv: str, temperature: float) -> tuple[float, float]:
    """The largest difference between engine and trainer, of log-probability and of entropy."""
    worst_logp = worst_entropy = 0.0
    for done in finished:
        for rollout in done.rollouts:
            logp, spread = rescore(lab, done.ticket.prompt, rollout, kv, temperature)
            worst_logp = max(worst_logp, float((rollout.logp - logp).abs().max()))
            worst_entropy = max(worst_entropy, float((rollout.entropy - spread).abs().max()))
    return worst_logp, worst_entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("version", [0, 3])
def test_logp_and_entropy_equal_the_trainers_scoring(lab: Lab, temperature: float, version: int) -> None:
    sampling = replace(SAMPLING, temperature=temperature)
    finished = lab.run([lab.ticket(i, [(0, version)]) for i in range(8)], sampling)
    logp, spread = errors(lab, finished, "keep", temperature)
    assert logp < TOLERANCE
    assert spread < TOLERANCE


def test_the_trainers_own_scoring_path_agrees_with_the_cached_one(transformers_lab: Lab) -> None:
    from estr_lite.advantages import GroupCentered
    from estr_lite.data import collate
    from estr_lite.policy.score import score
    from estr_lite.rollout.worker import grade

    lab = transformers_lab
    finished = lab.run([lab.ticket(i, [(0, 3)]) for i in range(4)], SAMPLING)
    groups = [grade(done, lab.config.task, lab.parts.tokenizer) for done in finished]  # pyright: ignore
    groups = [replace(g, ticket=replace(g.ticket, step=5, segments=g.ticket.segments)) for g in groups]
    batch = collate(groups, GroupCentered())
    with torch.no_grad():
        logp, spread = score(lab.use(3), batch, 1.0)
    mask = batch.token_mask
    assert float((logp - batch.behavior_logp)[mask].abs().max()) < TOLERANCE
    assert float((spread - batch.behavior_entropy)[mask].abs().max()) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_across_an_in_flight_swap_every_token_is_scored_as_its_tagged_version_scores_it(
    lab: Lab, kv: str, temperature: float
) -> None:
    lab.set_kv(kv)
    finished = lab.run([lab.ticket(i, SWAPPED) for i in range(8)], replace(SAMPLING, temperature=temperature))
    logp, spread = errors(lab, finished, kv, temperature)
    assert logp < TOLERANCE
    assert spread < TOLERANCE


def test_keeping_the_cache_differs_from_recomputing_it_and_only_after_the_swap(lab: Lab) -> None:
    finished = lab.run([lab.ticket(i, SWAPPED) for i in range(8)], SAMPLING)
    before, after = [], []
    for done in finished:
        for rollout in done.rollouts:
            logp, _ = rescore(lab, done.ticket.prompt, rollout, "recompute", 1.0)
            difference = (rollout.logp - logp).abs()
            before.append(difference[:3])
            after.append(difference[3:])
    assert float(torch.cat(before).max()) < TOLERANCE
    assert float(torch.cat(after).max()) > 100 * TOLERANCE


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_version_tags_follow_the_ticket(lab: Lab, kv: str) -> None:
    lab.set_kv(kv)
    for done in lab.run([lab.ticket(i, SWAPPED) for i in range(4)], SAMPLING):
        for rollout in done.rollouts:
            assert rollout.version.tolist() == [version_at(done.ticket.segments, t) for t in range(len(rollout))]


def test_a_groups_samples_differ_and_are_reproducible_by_seed(lab: Lab) -> None:
    def tokens(seed: int) -> list[list[int]]:
        (done,) = lab.run([lab.ticket(0, [(0, 1)], seed)], replace(SAMPLING, rollouts=8))
        return [rollout.token_ids.tolist() for rollout in done.rollouts]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert len({tuple(t) for t in tokens(1)}) > 1


def test_a_sample_does_not_depend_on_what_it_is_decoded_with(lab: Lab) -> None:
    alone = lab.run([lab.ticket(3, [(0, 1)])], SAMPLING)[0]
    among = lab.run([lab.ticket(i, [(0, 1)]) for i in range(8)], SAMPLING)[3]
    for a, b in zip(alone.rollouts, among.rollouts, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()


def test_finishes_are_told_apart_and_the_stop_token_is_the_last(lab: Lab) -> None:
    eos = lab.parts.tokenizer.eos_token_id
    assert eos == lab.parts.tokenizer.pad_token_id  # so nothing here may go by token id
    for limit in (4, 40):
        for done in lab.run([lab.ticket(i, [(0, 0)]) for i in range(4)], replace(SAMPLING, max_tokens=limit)):
            for rollout in done.rollouts:
                ids = rollout.token_ids.tolist()
                assert eos not in ids[:-1]
                assert (rollout.finish == "stop") == (ids[-1] == eos)
                assert rollout.finish == "stop" or len(ids) == limit
    assert rollout.finish == "stop"


def test_a_swap_at_the_last_token_and_one_after_the_end_are_both_right(lab: Lab) -> None:
    segments = ((0, 1), (4, 2), (200, 3))
    (done,) = lab.run([lab.ticket(0, segments)], replace(SAMPLING, max_tokens=5))
    for rollout in done.rollouts:
        assert rollout.version.tolist() == [1, 1, 1, 1, 2][: len(rollout)]
        logp, _ = rescore(lab, done.ticket.prompt, rollout, "keep", 1.0)
        assert float((rollout.logp - logp).abs().max()) < TOLERANCE


def test_token_ids_go_in_and_come_out_untouched(lab: Lab) -> None:
    odd = replace(lab.prompt(0), token_ids=(19, 18, 17, 20, 20, 16, 1, 1, 18))  # decodes to text that encodes otherwise
    ticket = replace(lab.ticket(0, [(0, 2)]), prompt=odd)
    (done,) = lab.run([ticket], SAMPLING)
    assert done.ticket.prompt.token_ids == odd.token_ids
    assert errors(lab, [done], "keep", 1.0)[0] < TOLERANCE


def test_temperature_zero_takes_the_most_likely_token(lab: Lab) -> None:
    greedy = replace(SAMPLING, temperature=0.0, rollouts=1)
    model = lab.use(1)
    for done in lab.run([lab.ticket(i, [(0, 1)]) for i in range(4)], greedy):
        ids = torch.tensor([*done.ticket.prompt.token_ids, *done.rollouts[0].token_ids.tolist()])
        with torch.no_grad():
            best = model(input_ids=ids[None]).logits[0].argmax(-1)
        start = len(done.ticket.prompt.token_ids)
        assert best[start - 1 : -1].tolist() == ids[start:].tolist()


def test_a_cohort_waits_at_the_token_whose_version_is_missing_while_others_go_on(lab: Lab) -> None:
    waiting, free = lab.ticket(0, [(0, 0), (3, 1)]), lab.ticket(1, [(0, 0)])

    def job(engine: Engine) -> tuple[list[Finished], bool, list[Finished]]:
        engine.admit([waiting], SAMPLING)
        engine.admit([free], SAMPLING)
        first = list[Finished]()
        while engine.needs <= 0:
            first += engine.step(0).finished
        stuck = engine.needs > 0 and engine.needs <= 1
        second = list[Finished]()
        while engine.needs <= 1:
            second += engine.step(1).finished
        return first, stuck, second

    first, stuck, second = lab.thread.submit(job).result()
    assert [done.ticket.slot for done in first] == [1]
    assert stuck
    assert [done.ticket.slot for done in second] == [0]
    assert errors(lab, second, "keep", 1.0)[0] < TOLERANCE


def test_groups_of_different_versions_share_a_decode(lab: Lab) -> None:
    def job(engine: Engine) -> list[Finished]:
        for i in range(4):
            engine.admit([lab.ticket(i, [(0, i)])], SAMPLING)
        found = list[Finished]()
        while engine.needs <= 9:
            found += engine.step(9).finished
        return found

    finished = lab.thread.submit(job).result()
    assert sorted(done.ticket.slot for done in finished) == [0, 1, 2, 3]
    assert errors(lab, finished, "keep", 1.0)[0] < TOLERANCE


def test_the_engines_score_is_the_trainers(lab: Lab) -> None:
    for version in range(6):
        found = lab.thread.submit(lambda engine, v=version: engine.score(v, lab.parts.probe)).result()
        assert float((found - lab.parts.store[version].probe_logp).abs().max()) < TOLERANCE


def test_the_canary_passes_a_right_adapter_and_names_the_version_of_a_wrong_one(lab: Lab) -> None:
    canary = Canary(lab.parts.store, lab.parts.probe, 1e-3)
    lab.thread.submit(lambda engine: canary(engine, 3)).result()
    assert canary.worst < TOLERANCE

    right = lab.parts.store[4]  # told what version 5 scores, as if version 5 had not arrived in the engine
    lab.parts.store.add(replace(right, scored=lab.parts.store[5].scored))
    try:
        with pytest.raises(CanaryError, match="version 4"):
            lab.thread.submit(lambda engine: canary(engine, 4)).result()
    finally:
        lab.parts.store.add(right)


def test_top_p_and_top_k_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"sampling.top_p must be 1, got 0.9: it cuts the support"):
        Sampling(top_p=0.9)
    with pytest.raises(ValueError, match=r"sampling.top_k must be 0, got 50: it cuts the support"):
        Sampling(top_k=50)


def test_logits_that_are_not_finite_are_marked_and_do_not_touch_other_rows(lab: Lab) -> None:
    broken = {name: torch.full_like(t, math.nan) for name, t in lab.parts.store[1].tensors.items()}
    lab.parts.store.add(replace(lab.parts.store[1], version=9, tensors=broken))

    def job(engine: Engine) -> list[Finished]:
        engine.admit([lab.ticket(0, [(0, 9)])], replace(SAMPLING, max_tokens=4))
        engine.admit([lab.ticket(1, [(0, 1)])], SAMPLING)
        found = list[Finished]()
        while engine.needs <= 9:
            found += engine.step(9).finished
        return sorted(found, key=lambda done: done.ticket.slot)

    bad, good = lab.thread.submit(job).result()
    for rollout in bad.rollouts:
        assert rollout.logp.isnan().all()
        assert rollout.entropy.isnan().all()
    assert errors(lab, [good], "keep", 1.0)[0] < TOLERANCE

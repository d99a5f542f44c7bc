"""Faults in the order of an epoch."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_TESTS = "data/order/"

FAULTS: dict[str, Fault] = {
    "epochs-in-one-order": Fault(
        "src/raglane/data/order/batches.py",
        "key=key_of(self.seed, epoch),",
        "key=key_of(self.seed),",
        _TESTS + "test_batches.py::test_epochs_and_seeds_differ_in_company_and_order",
    ),
    "the-last-batch-resumed-twice": Fault(
        "src/raglane/data/order/batches.py",
        "skipped = max(start, before) - before",
        "skipped = max(start - 1, before) - before",
        _TESTS + "test_batches.py::test_resuming_gives_exactly_the_batches_that_remain",
    ),
    "an-ended-epoch-comes-again": Fault(
        "src/raglane/data/epochs.py",
        "self.set_epoch(self.epoch + 1)",
        "self.set_epoch(self.epoch)",
        _TESTS + "test_batches.py::test_a_plain_loop_gets_other_batches_in_every_epoch",
    ),
    "ranks-take-turns": Fault(
        "src/raglane/data/order/batches.py",
        "owners_of(self._lengths[rows], self.ranks) == self.rank",
        "np.arange(len(rows)) % self.ranks == self.rank",
        _TESTS + "test_batches.py::test_ranks_have_equal_work",
    ),
    "the-largest-comes-again": Fault(
        "src/raglane/data/order/batches.py",
        "without=np.union1d(self._dropped, largest),",
        "without=self._dropped,",
        _TESTS + "test_batches.py::test_every_sequence_comes_once_in_batches_that_keep_the_limit",
    ),
    "the-largest-is-not-filled-up": Fault(
        "src/raglane/data/order/batches.py",
        "while limit.elements is not None and len(chosen) < most:",
        "while False:",
        _TESTS + "test_batches.py::test_the_largest_batch_is_the_first_of_all_epochs",
    ),
    "a-batch-one-element-too-long": Fault(
        "src/raglane/data/order/limit.py",
        "bisect_right(ends, before + self.elements, start)",
        "bisect_right(ends, before + self.elements + 1, start)",
        _TESTS + "test_limit.py::test_batches_are_as_large_as_can_be",
    ),
    "the-last-batch-stays-tiny": Fault(
        "src/raglane/data/order/limit.py",
        "if fits.any():",
        "if False:",
        _TESTS + "test_limit.py::test_a_rest_is_shared_by_the_last_two",
    ),
    "ties-go-to-another-part": Fault(
        "src/raglane/data/order/shares.py",
        "again = had[1:] >= np.minimum",
        "again = had[1:] > np.minimum",
        _TESTS + "test_shares.py",
    ),
    "a-network-of-two-rounds": Fault(
        "src/raglane/data/order/permutation.py",
        "_ROUNDS = 6",
        "_ROUNDS = 2",
        _TESTS + "test_permutation.py::test_a_network_is_like_a_random_permutation",
    ),
    "numbers-beyond-the-domain": Fault(
        "src/raglane/data/order/permutation.py",
        "while len(beyond):",
        "if len(beyond):",
        _TESTS + "test_permutation.py::test_every_number_comes_once",
    ),
    "lengths-without-noise": Fault(
        "src/raglane/data/order/arrangement.py",
        "if not noise:",
        "if noise >= 0:",
        _TESTS + "test_batches.py::test_orders_are_what_they_say",
    ),
    "a-piece-without-its-end": Fault(
        "src/raglane/data/order/limit.py",
        "found[last] = lengths - (counts - 1) * longest",
        "found[last] = np.minimum(lengths, longest)",
        _TESTS + "test_limit.py::test_pieces",
    ),
    "lengths-in-a-file-are-copied": Fault(
        "src/raglane/data/order/settled.py",
        "if is_mapped(lengths.ctypes.data, lengths.nbytes):",
        "if lengths.nbytes < 0:",
        _TESTS + "test_settled.py::test_lengths_in_a_file_stay_there_and_give_the_same_batches",
    ),
    "a-file-that-is-written-to-is-not-copied": Fault(
        "src/raglane/_utils/memory.py",
        ' and (b"w" not in allowed or b"p" in allowed)',
        "",
        _TESTS + "test_settled.py::test_a_file_that_is_mapped_to_be_written_is_copied",
    ),
    "too-long-in-a-later-block": Fault(
        "src/raglane/data/order/settled.py",
        "start + np.flatnonzero(block > most)",
        "np.flatnonzero(block > most)",
        _TESTS + "test_settled.py::test_lengths_in_blocks_are_as_a_whole",
    ),
    "lengths-sorted-in-too-few-bits": Fault(
        "src/raglane/data/order/arrangement.py",
        "if longest < 2**16 else found",
        "if longest >= 0 else found",
        _TESTS + "test_settled.py::test_batches_are_those_that_were_recorded",
    ),
    "the-same-noise-in-every-epoch": Fault(
        "src/raglane/data/order/arrangement.py",
        "shares_of(key_of(self._key, _NOISE), rows)",
        "shares_of(_NOISE, rows)",
        _TESTS + "test_batches.py::test_noise_is_other_noise_in_every_epoch_and_for_every_seed",
    ),
    "noise-with-the-key-of-the-order": Fault(
        "src/raglane/data/order/arrangement.py",
        "key_of(self._key, _NOISE)",
        "key_of(self._key, _WHOLE)",
        _TESTS + "test_settled.py::test_batches_are_those_that_were_recorded",
    ),
    "the-largest-beyond-another-limit": Fault(
        "src/raglane/data/order/batches.py",
        " or limit.shares(sizes[[*chosen, place]])[-1] > 1:",
        ":",
        _TESTS + "test_settled.py::test_the_largest_batch_keeps_every_limit",
    ),
    "a-place-before-its-pool": Fault(
        "src/raglane/data/order/batches.py",
        "and (done >= before or pool == 0)",
        "and before >= 0",
        _TESTS + "test_batches.py::test_a_state_of_others_is_refused",
    ),
}

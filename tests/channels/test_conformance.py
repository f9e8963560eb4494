"""What every transport does."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlgraph.errors import ChannelBroken, ChannelClosed, ChannelError, ChannelTimeout

LONG, SHORT = 120.0, 0.02
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def number(value):
    return {"x": torch.tensor([value])}


def taken(reader, step):
    value = int(reader.take(step, LONG)["x"])
    reader.release()
    return value


def take_all(reader, steps):
    for step in range(steps):
        reader.take(step, LONG)


def put_all(writer, steps, first=0):
    """Put more than the slots hold: news from another host take a moment, and who waits for a slot waits for them."""
    for step in range(first, steps):
        writer.put(step, number(step), LONG)


def test_messages_arrive_in_the_order_in_which_they_were_put(make):
    writer, [reader] = make(slots=3)
    got = []
    for first in range(0, 9, 3):
        for step in range(first, first + 3):
            writer.put(step, number(step), LONG)
        got += [taken(reader, step) for step in range(first, first + 3)]
    assert got == list(range(9))


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_writer_is_stopped_when_all_slots_are_taken(make, slots):
    writer, _ = make(slots=slots)
    for step in range(slots):
        writer.put(step, number(step), LONG)
    with pytest.raises(ChannelTimeout, match=rf"'edge', the writer, step {slots}: waited .* s, all {slots} slots are taken"):
        writer.put(slots, number(slots), SHORT)


def test_a_slot_is_free_again_when_its_message_is_released_and_not_when_it_is_taken(make):
    writer, [reader] = make(slots=1)
    writer.put(0, number(0), LONG)
    reader.take(0, LONG)
    with pytest.raises(ChannelTimeout):
        writer.put(1, number(1), SHORT)
    reader.release()
    writer.put(1, number(1), LONG)
    assert taken(reader, 1) == 1


def test_each_of_many_readers_sees_every_message_once(make):
    writer, readers = make(slots=2, readers=3)
    for step in range(4):
        writer.put(step, number(step), LONG)
        assert [taken(reader, step) for reader in readers] == [step] * 3


def test_a_slot_shared_by_readers_is_free_when_the_last_of_them_released_it(make):
    writer, [fast, slow] = make(slots=1, readers=2)
    writer.put(0, number(0), LONG)
    taken(fast, 0)
    with pytest.raises(ChannelTimeout):
        writer.put(1, number(1), SHORT)
    taken(slow, 0)
    writer.put(1, number(1), LONG)


def test_a_reader_holds_several_messages_and_releases_the_oldest_first(make):
    writer, [reader] = make(slots=2)
    writer.put(0, number(0), LONG)
    writer.put(1, number(1), LONG)
    first, second = reader.take(0, LONG)["x"], reader.take(1, LONG)["x"]
    reader.release()
    writer.put(2, number(2), LONG)
    assert second.item() == 1
    del first
    reader.release()
    assert taken(reader, 2) == 2


def test_a_reader_of_a_silent_writer_times_out_and_can_go_on(make):
    writer, [reader] = make()
    with pytest.raises(ChannelTimeout, match=r"'edge', a reader, step 0: waited .* s, no message"):
        reader.take(0, SHORT)
    writer.put(0, number(7), LONG)
    assert taken(reader, 0) == 7


def test_readers_take_the_messages_in_the_slots_before_they_see_the_close(make):
    writer, readers = make(slots=2, readers=2)
    writer.put(0, number(0), LONG)
    writer.put(1, number(1), LONG)
    writer.close()
    for reader in readers:
        assert [taken(reader, 0), taken(reader, 1)] == [0, 1]
        with pytest.raises(ChannelClosed, match=r"'edge', a reader, step 2: the writer .*closed"):
            reader.take(2, LONG)


def test_a_failed_writer_breaks_the_channel_as_soon_as_the_news_arrives(make):
    writer, readers = make(readers=2)
    writer.put(0, number(0), LONG)
    writer.fail("out of memory")
    for reader in readers:
        with pytest.raises(ChannelBroken, match=r"'edge', a reader, step [01]: the writer .*failed: out of memory"):
            take_all(reader, 2)  # from another host the message may arrive first


def test_a_failed_reader_breaks_the_channel_for_the_writer(make):
    writer, readers = make(readers=2)
    readers[1].fail("bad batch")
    with pytest.raises(ChannelBroken, match=r"'edge', the writer, step [012]: a reader .*failed: bad batch"):
        put_all(writer, 3)


def test_a_reader_that_closes_ends_the_channel_for_the_writer_but_not_for_other_readers(make):
    writer, [leaves, stays] = make(readers=2)
    writer.put(0, number(0), LONG)
    leaves.close()
    with pytest.raises(ChannelClosed, match=r"'edge', the writer, step [12]: a reader .*closed"):
        put_all(writer, 3, first=1)
    assert taken(stays, 0) == 0


def test_an_end_raises_after_its_own_close(make):
    writer, [reader] = make()
    writer.put(0, number(0), LONG)
    reader.close()
    writer.close()
    with pytest.raises(ChannelClosed):
        reader.take(0, LONG)
    with pytest.raises(ChannelClosed):
        writer.put(1, number(1), LONG)


def test_messages_can_be_released_after_the_writer_closed(make):
    writer, [reader] = make()
    writer.put(0, number(0), LONG)
    reader.take(0, LONG)
    writer.close()
    reader.release()
    with pytest.raises(ChannelClosed):
        reader.take(1, LONG)


def test_a_message_of_another_step_is_a_defect_and_stays_there(make):
    writer, [reader] = make()
    writer.put(4, number(4), LONG)
    with pytest.raises(ChannelError, match="'edge', a reader, step 3: the next message is that of step 4"):
        reader.take(3, LONG)
    assert taken(reader, 4) == 4


def test_floating_point_columns_are_cast_on_put_and_others_are_not(make):
    writer, [reader] = make()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    writer.put(0, {"x": x.T, "ids": torch.arange(3), "mask": torch.tensor([True])}, LONG, dtype=torch.bfloat16)
    got = reader.take(0, LONG)
    assert torch.equal(got["x"], x.T.to(torch.bfloat16))
    assert got["x"].dtype == torch.bfloat16
    assert (got["ids"].dtype, got["mask"].dtype) == (torch.int64, torch.bool)


def test_a_cast_column_is_a_copy_even_where_the_dtype_is_its_own(make):
    writer, [reader] = make()
    x = torch.zeros(3)
    writer.put(0, {"x": x}, LONG, dtype=torch.float32)
    x += 1
    assert reader.take(0, LONG)["x"].tolist() == [0, 0, 0]


def test_a_message_without_columns_passes(make):
    writer, [reader] = make()
    writer.put(0, {}, LONG)
    assert reader.take(0, LONG) == {}
    reader.release()


def test_the_reader_sees_every_change_between_messages_of_one_slot(make):
    writer, [reader] = make(slots=1)
    x = torch.arange(6.0)
    messages = [
        *({"x": x}, {"x": x + 1}, {"y": x + 1}, {"x": x.view(2, 3)}, {"x": x.view(3, 2) + 1}, {"x": x.view(2, 3).T}),
        *({"x": x.double()}, {"x": x.long()}, {"x": x, "y": x + 1}, {"y": x + 2, "x": x}, {"x": x[:5], "y": x}),
        *({"x": x, "who": ["a"]}, {"x": x, "who": ["b"]}, {"x": x}, {}, {"x": x}, {"x": torch.arange(10_000.0)}, {"x": x}),
    ]
    for step, columns in enumerate(messages):
        writer.put(step, columns, LONG)
        got = reader.take(step, LONG)
        assert list(got) == list(columns)
        assert [bits(c) for c in got.values()] == [bits(c) for c in columns.values()], step
        reader.release()


def test_the_reader_sees_a_changed_cast(make):
    writer, [reader] = make(slots=1)
    x = torch.arange(6.0)
    for step, dtype in enumerate([None, torch.bfloat16, torch.bfloat16, torch.float64, None]):
        writer.put(step, {"x": x + step}, LONG, dtype=dtype)
        got = reader.take(step, LONG)["x"]
        assert got.dtype == (dtype or torch.float32)
        assert got.tolist() == (x + step).tolist()
        reader.release()


def test_requires_grad_of_one_message_is_not_set_on_the_next(make):
    writer, [reader] = make(slots=1)
    writer.put(0, {"x": torch.ones(2)}, LONG)
    reader.take(0, LONG)["x"].requires_grad_()
    reader.release()
    writer.put(1, {"x": torch.ones(2)}, LONG)
    assert not reader.take(1, LONG)["x"].requires_grad


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    wide = [*shape[:-1], shape[-1] * 2] if shape else [1]
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, [*wide, dtype.itemsize], dtype=torch.uint8, generator=generator)
    full = raw.view(dtype).squeeze(-1)
    if not shape:
        return full[0]
    return full[..., ::2].movedim(0, -1) if draw(st.booleans()) else full[..., : shape[-1]]


def bits(column):
    if isinstance(column, list):
        return column
    return column.dtype, column.shape, column.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).tolist()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(columns=st.dictionaries(st.text(max_size=8), tensors() | st.lists(st.text()), max_size=5))
def test_columns_arrive_bit_for_bit(make, columns):
    writer, [reader] = make()
    writer.put(0, columns, LONG)
    got = reader.take(0, LONG)
    assert list(got) == list(columns)
    assert [bits(c) for c in got.values()] == [bits(c) for c in columns.values()]
    del got
    reader.release()
    reader.close()
    writer.close()


def test_statistics_count_messages_bytes_and_slots(make):
    writer, [reader] = make(slots=3)
    for step in range(3):
        writer.put(step, {"x": torch.zeros(1000)}, LONG)
    seen = writer.statistics()
    assert (seen.slots, seen.used, seen.peak_used, seen.messages) == (3, 3, 3, 3)
    assert 12000 <= seen.bytes <= 12600
    reader.take(0, LONG)
    reader.take(1, LONG)
    reader.release()
    seen = reader.statistics()
    assert (seen.slots, seen.used, seen.peak_used, seen.messages) == (3, 1, 2, 2)
    assert 8000 <= seen.bytes <= 8400
    writer.put(3, {}, LONG)
    assert (writer.statistics().used, writer.statistics().peak_used) == (3, 3)


def test_a_column_changed_in_place_is_found_at_release(make):
    writer, [reader] = make()
    writer.put(0, number(1), LONG)
    reader.take(0, LONG)["x"][:1] += 1
    with pytest.raises(ChannelError, match="'edge', a reader, step 0: column 'x' was changed in place"):
        reader.release()


def test_a_column_that_requires_grad_arrives_without_its_graph(make):
    writer, [reader] = make()
    writer.put(0, {"x": torch.ones(2, requires_grad=True)}, LONG)
    assert not reader.take(0, LONG)["x"].requires_grad


def test_a_release_without_a_take_is_a_defect(make):
    _, [reader] = make()
    with pytest.raises(ChannelError, match=r"'edge', a reader: release\(\) without"):
        reader.release()


@pytest.mark.parametrize("column", [(1, 2), [1, 2], "text", None])
def test_a_value_that_is_no_column_is_refused(make, column):
    writer, _ = make()
    with pytest.raises(ChannelError, match=f"'edge', the writer, step 0: column 'x' is a {type(column).__name__}"):
        writer.put(0, {"x": column}, LONG)


@pytest.mark.parametrize(("slots", "readers"), [(0, 1), (65, 1), (1, 0)])
def test_impossible_numbers_of_slots_and_readers_are_refused(make, slots, readers):
    with pytest.raises(ChannelError, match="channel 'edge' has"):
        make(slots=slots, readers=readers)

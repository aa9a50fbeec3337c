/* SPDX-License-Identifier: Apache-2.0 */
#include "slicing.h"

enum { LEAST_SLICE = 32 };

static uint64_t up(uint64_t number, uint64_t by)
{
	return (number + by - 1) / by;
}

/* The part of N elements that begins at `first` and has `size` of them, cut at N. */
static void cut(uint64_t elements, uint64_t first, uint64_t size, struct sent *part)
{
	part->first = first;
	part->count = first >= elements ? 0 : elements - first < size ? elements - first : size;
}

/* The cells of each channel but the last. NCCL rounds a channel's traffic down, so this may be one too few. */
static uint64_t share_of(const struct slicing *s)
{
	uint64_t bytes = s->elements * s->itemsize, traffic = 2 * bytes / s->allowed,
		 share = up(traffic, 2 * (uint64_t)s->sizes.cell);

	return share ? share : 1;
}

uint32_t slicing_used(const struct slicing *s)
{
	uint64_t used = up(up(s->elements * s->itemsize, s->sizes.cell), share_of(s));

	return used < s->channels ? (uint32_t)used : s->channels;
}

static void channel_part(const struct slicing *s, uint32_t channel, uint32_t used, struct sent *part)
{
	uint64_t share = share_of(s) * (s->sizes.cell / s->itemsize);

	cut(s->elements, share * channel, channel + 1 == used ? s->elements : share, part);
}

/* The elements of a chunk in a loop over the ring that begins with `left` elements. */
static uint64_t chunk_of(const struct slicing *s, uint64_t left)
{
	const struct slicing_sizes *sizes = &s->sizes;
	uint64_t whole = sizes->buffer / sizes->steps * sizes->chunk_steps / sizes->grain * sizes->grain / s->itemsize;
	uint64_t line = sizes->alignment / s->itemsize;

	return left < s->ranks * whole ? up(up(left, s->ranks), line) * line : whole;
}

/* The elements of each slice of a chunk but the last ones. */
static uint64_t slice_of(const struct slicing *s, uint64_t chunk)
{
	const struct slicing_sizes *sizes = &s->sizes;
	uint64_t least = sizes->buffer / sizes->steps / s->itemsize * sizes->slice_steps / LEAST_SLICE;
	uint64_t line = sizes->alignment, slices = sizes->chunk_steps / sizes->slice_steps;
	uint64_t size = up(chunk, line * slices) * line;

	return size > least ? size : least;
}

int slicing_send(const struct slicing *s, uint32_t channel, uint32_t step, struct sent *sent)
{
	uint32_t slices = s->sizes.chunk_steps / s->sizes.slice_steps, rounds = 2 * (s->ranks - 1);
	uint32_t at = step / slices % rounds, used = slicing_used(s);
	uint64_t chunk, loop, number;
	struct sent part, piece;

	if (channel >= used)
		return -1;
	channel_part(s, channel, used, &part);
	loop = (uint64_t)(step / slices / rounds) * s->ranks * chunk_of(s, part.count); /* elements before it */
	if (loop >= part.count)
		return -1;
	chunk = chunk_of(s, part.count - loop);
	sent->round = (int)at - (int)(s->ranks - 1);
	number = (s->index + 2 * s->ranks - (sent->round < 0 ? at + 1 : (uint32_t)sent->round)) % s->ranks;
	cut(part.count, loop + number * chunk, chunk, &piece);
	cut(piece.count, step % slices * slice_of(s, piece.count), slice_of(s, piece.count), sent);
	sent->first += part.first + piece.first;
	return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "slicing.h"

enum { LINE = 16, STEPS = 8, CHUNK_UNIT = 512, SLICES = 2 };

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
	uint64_t bytes = s->elements * s->itemsize, traffic = 2 * bytes / s->allowed, share = up(traffic, 2 * s->cell);

	return share ? share : 1;
}

uint32_t slicing_used(const struct slicing *s)
{
	uint64_t used = up(up(s->elements * s->itemsize, s->cell), share_of(s));

	return used < s->channels ? (uint32_t)used : s->channels;
}

static void channel_part(const struct slicing *s, uint32_t channel, uint32_t used, struct sent *part)
{
	uint64_t share = share_of(s) * (s->cell / s->itemsize);

	cut(s->elements, share * channel, channel + 1 == used ? s->elements : share, part);
}

int slicing_send(const struct slicing *s, uint32_t channel, uint32_t step, struct sent *sent)
{
	uint32_t rounds = 2 * (s->ranks - 1), at = step / SLICES % rounds, used = slicing_used(s);
	uint64_t chunk, loop, least, size, number;
	struct sent part, piece;

	if (channel >= used)
		return -1;
	channel_part(s, channel, used, &part);
	chunk = s->buffer / STEPS * 4 / CHUNK_UNIT * CHUNK_UNIT / s->itemsize;
	loop = (uint64_t)(step / SLICES / rounds) * s->ranks * chunk; /* elements before it */
	if (loop >= part.count)
		return -1;
	if (part.count - loop < s->ranks * chunk)
		chunk = up(up(part.count - loop, s->ranks), LINE / s->itemsize) * (LINE / s->itemsize);
	sent->round = (int)at - (int)(s->ranks - 1);
	number = (s->index + 2 * s->ranks - (sent->round < 0 ? at + 1 : (uint32_t)sent->round)) % s->ranks;
	cut(part.count, loop + number * chunk, chunk, &piece);
	least = s->buffer / STEPS / s->itemsize * 2 / (LINE * SLICES);
	size = up(piece.count, LINE * SLICES) * LINE;
	size = size > least ? size : least;
	cut(piece.count, step % SLICES * size, size, sent);
	sent->first += part.first + piece.first;
	return 0;
}

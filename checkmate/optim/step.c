// Steps of SGD, Adam and AdamW in one pass over memory, with the roundings of PyTorch's own steps.
//
// A step of PyTorch's is a sequence of operations, each of which rounds its result to the tensor's type. Every one
// is correctly rounded, on CPUs and on GPUs. They differ in which multiplications and additions are fused into one
// rounding, and in whether a division by a number is a multiplication by its reciprocal:
//
//                                  CPU                    GPU
//     add(a, b, alpha=s)           fma(s, b, a)           the same
//     lerp(a, b, w), w < 0.5       fma(w, b - a, a)       the same
//     lerp(a, b, w), otherwise     fma(w - 1, b - a, b)   the same
//     addcmul(a, b, c, value=s)    fma(s * b, c, a)       fma(s, b * c, a)
//     addcdiv(a, b, c, value=s)    (s * b) / c + a        fma(s, b / c, a)
//     a / s                        a / s                  a * (1 / s); _foreach_div with a list: a / s
//     sqrt(a)                      by MKL, if it is there  correctly rounded
//
// PyTorch's fused kernels on a GPU compute in fp32, and round to the tensor's type once, when they store. The
// compiler must fuse nothing by itself (-ffp-contract=off). TYPE is one of F32, BF16 and F16.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define F32 0
#define BF16 1
#define F16 2
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

enum rule { CPU, GPU, GPU_FUSED };
enum decay { NO_DECAY, COUPLED, DECOUPLED };
enum momentum { NO_MOMENTUM, MOMENTUM, NESTEROV };

// Elements that are held as fp32 at a time: five such tiles fit a first-level cache.
enum { TILE = 512 };

// High accuracy, subnormals as they are, no report of errors: PyTorch's choice.
enum { MKL_MODE = 0x2 | 0x140000 | 0x100 };

struct step {
	uint32_t rule, decay, momentum;
	uint32_t negated; // by the option `maximize`
	// MKL's vmsSqrt, of which PyTorch takes square roots on many CPUs: it does not round all of them correctly. Or
	// NULL.
	void (*square_roots)(int, const float *, float *, long long);
	int (*set_mkl_threads)(int); // of the calling thread; returns the number before. Or NULL.
};

// A tensor's part of a step. SGD has no `second`, and no `first` without momentum.
struct run {
	void *parameter;
	const void *gradient;
	void *first; // exp_avg, or momentum_buffer
	void *second; // exp_avg_sq
	void *greatest; // max_exp_avg_sq, or NULL
	uint64_t elements;
	uint64_t factors; // the number of factors of the gradient, each of which rounds it
	float factor[4];
	float numbers[8]; // by the enumerations that follow
};

// Adam's numbers. `DECAY` is what multiplies the parameter if decay is decoupled: 1 without decay.
enum { DECAY, WEIGHT, BETA_2, REST_2, ROOT, EPSILON, SIZE, IS_RECIPROCAL };
enum { FUSED_DECAY, FUSED_BETA_1, FUSED_BETA_2, FUSED_SIZE, FUSED_ROOT, FUSED_EPSILON, FUSED_SCALE };
enum { SGD_DECAY, SGD_MOMENTUM, SGD_REST, SGD_RATE };

INLINE float from_bits(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof value);
	return value;
}

INLINE uint32_t to_bits(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	return bits;
}

#if TYPE == BF16

typedef uint16_t stored;

INLINE float opened_value(stored half)
{
	return from_bits((uint32_t)half << 16);
}

// To nearest, ties to even. A NaN stays one: its lower half is zero, so that nothing is carried into the sign.
INLINE uint32_t rounded_bits(float value)
{
	uint32_t bits = to_bits(value);
	return bits + 0x7fffu + (bits >> 16 & 1);
}

INLINE float rounded(float value)
{
	return from_bits(rounded_bits(value) & 0xffff0000u);
}

// A value that is rounded already.
INLINE stored stored_value(float value)
{
	return (stored)(to_bits(value) >> 16);
}

#elif TYPE == F16

typedef uint16_t stored;

// One of two values, without a branch.
INLINE uint32_t either(uint32_t first, uint32_t value, uint32_t otherwise)
{
	return (value & -first) | (otherwise & (first - 1));
}

// To nearest, ties to even: to 11 bits, or, if subnormal, to a multiple of 2^-24.
INLINE float rounded(float value)
{
	uint32_t sign = to_bits(value) & 0x80000000u, bits = to_bits(value) ^ sign;
	uint32_t subnormal = to_bits((from_bits(bits) + 0.75f) - 0.75f);
	uint32_t normal = (bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu;
	uint32_t beyond = bits > 0x7f800000u ? bits : 0x7f800000u; // a NaN, or infinity
	normal = either(normal >= 0x47800000u, beyond, normal);
	return from_bits(either(bits < 0x38800000u, subnormal, normal) | sign);
}

// The exponents of half precision end at -14, those of fp32 at -126: a factor makes up for the difference.
INLINE float opened_value(stored half)
{
	uint32_t magnitude = (half & 0x7fffu) << 13, sign = (uint32_t)(half & 0x8000u) << 16;
	float finite = from_bits(magnitude) * 0x1p112f;
	uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : to_bits(finite);
	return from_bits(bits | sign);
}

// A value that is rounded already.
INLINE stored stored_value(float value)
{
	uint32_t sign = to_bits(value) & 0x80000000u, bits = to_bits(value) ^ sign;
	uint32_t finite = to_bits(from_bits(bits) * 0x1p-112f) >> 13;
	uint32_t beyond = bits > 0x7f800000u ? 0x7e00u : 0x7c00u; // a NaN, or infinity
	return (stored)(either(bits >= 0x7f800000u, beyond, finite) | sign >> 16);
}

#else

typedef float stored;

INLINE float rounded(float value)
{
	return value;
}

#endif

static void load(float *restrict tile, const void *whole, size_t at, size_t count)
{
	const stored *restrict elements = (const stored *)whole + at;
#if TYPE == F32
	memcpy(tile, elements, count * sizeof *tile);
#else
	for (size_t i = 0; i < count; i++)
		tile[i] = opened_value(elements[i]);
#endif
}

// Elements as fp32: where they are, or in the tile.
static float *opened(float *tile, void *whole, size_t at, size_t count)
{
#if TYPE == F32
	(void)tile, (void)count;
	return (float *)whole + at;
#else
	load(tile, whole, at, count);
	return tile;
#endif
}

static void closed(const float *restrict tile, void *whole, size_t at, size_t count, int is_rounded)
{
#if TYPE == F32
	(void)tile, (void)whole, (void)at, (void)count, (void)is_rounded;
#else
	stored *restrict elements = (stored *)whole + at;
	if (is_rounded)
		for (size_t i = 0; i < count; i++)
			elements[i] = stored_value(tile[i]);
	else
		for (size_t i = 0; i < count; i++)
			elements[i] = stored_value(rounded(tile[i]));
#endif
}

// Elements of the gradient, with its factors and its sign.
static const float *prepared(float *restrict tile, const struct step *step, const struct run *run, size_t at,
			     size_t count)
{
	if (TYPE == F32 && !run->factors && !step->negated)
		return (const float *)run->gradient + at;
	load(tile, run->gradient, at, count);
	for (size_t k = 0; k < run->factors; k++) {
		const float factor = run->factor[k];
		for (size_t i = 0; i < count; i++)
			tile[i] = rounded(tile[i] * factor);
	}
	if (step->negated)
		for (size_t i = 0; i < count; i++)
			tile[i] = -tile[i];
	return tile;
}

// Advance the means of an element; return what its square root is taken of.
INLINE float advanced(float parameter, float gradient, float *restrict m, float *restrict v, float *restrict x,
		      size_t i, const float *numbers, int rule, int coupled, int greatest)
{
	const float weight = numbers[WEIGHT], rest_2 = numbers[REST_2];
	const int near = fabsf(weight) < 0.5f;
	float square;
	if (coupled)
		gradient = rounded(fmaf(numbers[DECAY], parameter, gradient));
	m[i] = rounded(fmaf(near ? weight : weight - 1.0f, gradient - m[i], near ? m[i] : gradient));
	square = rounded(v[i] * numbers[BETA_2]);
	square = rounded(rule == GPU ? fmaf(rest_2, gradient * gradient, square)
				     : fmaf(rest_2 * gradient, gradient, square));
	v[i] = square;
	if (!greatest)
		return square;
	return x[i] = square > x[i] || square != square ? square : x[i]; // torch.maximum, in which a NaN wins
}

// The parameter after the step, by its mean and the square root.
INLINE float moved(float parameter, float mean, float root, const float *numbers, int rule, int coupled)
{
	const float size = numbers[SIZE];
	if (!coupled)
		parameter = rounded(parameter * numbers[DECAY]);
	root = rounded(numbers[IS_RECIPROCAL] != 0.0f ? root * numbers[ROOT] : root / numbers[ROOT]);
	root = rounded(root + numbers[EPSILON]);
	return rounded(rule == GPU ? fmaf(size, mean / root, parameter) : size * mean / root + parameter);
}

// Have the next tile fetched from memory while this one is computed.
INLINE void prefetch(const float *tile, size_t count)
{
	for (size_t i = 0; i < count; i += 64 / sizeof *tile)
		__builtin_prefetch(tile + count + i);
}

INLINE void adam(const struct step *step, float *restrict p, const float *restrict g, float *restrict m,
		 float *restrict v, float *restrict x, size_t count, const float *all_numbers, int rule, int coupled,
		 int greatest)
{
	float roots[TILE], numbers[8];
	memcpy(numbers, all_numbers, sizeof numbers);
	if (rule != CPU || !step->square_roots) {
		for (size_t i = 0; i < count; i++) {
			float most = advanced(p[i], g[i], m, v, x, i, numbers, rule, coupled, greatest);
			p[i] = moved(p[i], m[i], rounded(sqrtf(most)), numbers, rule, coupled);
		}
		return;
	}
	for (size_t i = 0; i < count; i++)
		advanced(p[i], g[i], m, v, x, i, numbers, rule, coupled, greatest);
	if (TYPE == F32) {
		prefetch(p, count);
		prefetch(g, count);
		prefetch(m, count);
		prefetch(v, count);
	}
	step->square_roots((int)count, greatest ? x : v, roots, MKL_MODE);
	for (size_t i = 0; i < count; i++)
		p[i] = moved(p[i], m[i], roots[i], numbers, rule, coupled);
}

INLINE void fused_adam(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
		       float *restrict x, size_t count, const float *numbers, int decay, int greatest)
{
	const float by = numbers[FUSED_DECAY], beta_1 = numbers[FUSED_BETA_1], beta_2 = numbers[FUSED_BETA_2];
	const float size = numbers[FUSED_SIZE], root = numbers[FUSED_ROOT], epsilon = numbers[FUSED_EPSILON];
	const float scale = numbers[FUSED_SCALE];
	for (size_t i = 0; i < count; i++) {
		float parameter = p[i], gradient = g[i] * scale, square, most;
		if (decay == COUPLED)
			gradient = fmaf(parameter, by, gradient);
		if (decay == DECOUPLED)
			parameter = fmaf(-by, parameter, parameter);
		m[i] = fmaf(beta_1, m[i], fmaf(-beta_1, gradient, gradient));
		square = gradient * gradient;
		v[i] = most = fmaf(beta_2, v[i], fmaf(-beta_2, square, square));
		if (greatest) // std::max, in which a NaN loses
			x[i] = most = most > x[i] ? most : x[i];
		p[i] = parameter - size * m[i] / (sqrtf(most) / root + epsilon);
	}
}

#define ROUNDED(value) (once ? (value) : rounded(value))

INLINE void sgd(float *restrict p, const float *restrict g, float *restrict m, size_t count, const float *numbers,
		int once, int coupled, int momentum)
{
	const float decay = numbers[SGD_DECAY], by = numbers[SGD_MOMENTUM], rest = numbers[SGD_REST];
	const float rate = numbers[SGD_RATE];
	for (size_t i = 0; i < count; i++) {
		float gradient = g[i];
		if (coupled)
			gradient = ROUNDED(fmaf(decay, p[i], gradient));
		if (momentum) {
			m[i] = ROUNDED(fmaf(rest, gradient, ROUNDED(m[i] * by)));
			gradient = momentum == NESTEROV ? ROUNDED(fmaf(by, m[i], gradient)) : m[i];
		}
		p[i] = ROUNDED(fmaf(rate, gradient, p[i]));
	}
}

// Loops are compiled for each kind of step, because a compiler vectorises only those without branches.

#define ADAM(rule, coupled)                                                                                            \
	(x ? adam(step, p, g, m, v, x, count, numbers, rule, coupled, 1)                                               \
	   : adam(step, p, g, m, v, NULL, count, numbers, rule, coupled, 0))
#define FUSED_ADAM(decay)                                                                                              \
	(x ? fused_adam(p, g, m, v, x, count, numbers, decay, 1)                                                       \
	   : fused_adam(p, g, m, v, NULL, count, numbers, decay, 0))

static void adam_tile(const struct step *step, const float *numbers, float *p, const float *g, float *m, float *v,
		      float *x, size_t count)
{
	const int coupled = step->decay == COUPLED;
	if (step->rule == CPU)
		coupled ? ADAM(CPU, 1) : ADAM(CPU, 0);
	else if (step->rule == GPU)
		coupled ? ADAM(GPU, 1) : ADAM(GPU, 0);
	else if (step->decay == NO_DECAY)
		FUSED_ADAM(NO_DECAY);
	else
		coupled ? FUSED_ADAM(COUPLED) : FUSED_ADAM(DECOUPLED);
}

#define SGD(once, coupled)                                                                                             \
	(step->momentum == NESTEROV   ? sgd(p, g, m, count, numbers, once, coupled, NESTEROV)                          \
	 : step->momentum == MOMENTUM ? sgd(p, g, m, count, numbers, once, coupled, MOMENTUM)                          \
				      : sgd(p, g, NULL, count, numbers, once, coupled, NO_MOMENTUM))

static void sgd_tile(const struct step *step, const float *numbers, float *p, const float *g, float *m, size_t count)
{
	const int once = step->rule == GPU_FUSED && TYPE != F32;
	if (step->decay)
		once ? SGD(1, 1) : SGD(0, 1);
	else
		once ? SGD(1, 0) : SGD(0, 0);
}

static void step_run(const struct step *step, const struct run *run, uint64_t from, uint64_t to)
{
	const int is_rounded = step->rule != GPU_FUSED;
	float gradients[TILE], parameters[TILE], firsts[TILE], seconds[TILE], greatests[TILE];
	for (uint64_t at = from; at < to; at += TILE) {
		size_t count = to - at < TILE ? to - at : TILE;
		const float *g = prepared(gradients, step, run, at, count);
		float *p = opened(parameters, run->parameter, at, count);
		float *m = run->first ? opened(firsts, run->first, at, count) : NULL;
		if (run->second) {
			float *v = opened(seconds, run->second, at, count);
			float *x = run->greatest ? opened(greatests, run->greatest, at, count) : NULL;
			adam_tile(step, run->numbers, p, g, m, v, x, count);
			closed(v, run->second, at, count, is_rounded);
			if (x)
				closed(x, run->greatest, at, count, is_rounded);
		} else {
			sgd_tile(step, run->numbers, p, g, m, count);
		}
		closed(p, run->parameter, at, count, is_rounded);
		if (m)
			closed(m, run->first, at, count, is_rounded);
	}
}

// Step the elements [from, to) of all runs, counted over them in order.
EXPORT void checkmate_step(const struct step *step, const struct run *runs, uint64_t count, uint64_t from, uint64_t to)
{
	// MKL would start threads for each tile. These are threads already.
	int threads = step->set_mkl_threads ? step->set_mkl_threads(1) : 0;
	for (uint64_t i = 0; i < count && to; i++) {
		uint64_t elements = runs[i].elements, stop = to < elements ? to : elements;
		if (from < stop)
			step_run(step, &runs[i], from, stop);
		from -= from < elements ? from : elements;
		to -= stop;
	}
	if (step->set_mkl_threads)
		step->set_mkl_threads(threads);
}

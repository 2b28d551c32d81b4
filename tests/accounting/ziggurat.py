"""numpy's ziggurat in float64, its tables made anew, and the exact probability that one of its numbers falls into an interval."""

import math

import mpmath as mp
import numpy as np

R = 3.6541528853610088
INVERSE_R = 0.27366123732975828
STRIPS, BITS = 256, 52

mp.mp.dps = 50


def _tables():
    """Right ends x_i of the strips, from the bottom up; widths w_i, limits k_i and heights f_i as numpy has them."""
    r = mp.mpf("3.6541528853610087963519472518")
    area = r * mp.exp(-r * r / 2) + mp.sqrt(mp.pi / 2) * mp.erfc(r / mp.sqrt(2))
    ends = [area * mp.exp(r * r / 2), r]  # the bottom strip with its tail as a rectangle, then the others upwards
    while len(ends) < STRIPS:
        ends.append(mp.sqrt(-2 * mp.log(area / ends[-1] + mp.exp(-(ends[-1] ** 2) / 2))))
    width = [end / mp.mpf(2) ** BITS for end in ends]
    limit = [int(mp.floor(ends[i + 1] / ends[i] * mp.mpf(2) ** BITS)) if i + 1 < STRIPS else 0 for i in range(STRIPS)]
    height = [mp.exp(-end * end / 2) for end in [r, *ends[1:]]]
    return ends, width, limit, height, area


ENDS, WIDTH, LIMIT, HEIGHT, AREA = _tables()
WIDTH_F = [float(value) for value in WIDTH]
HEIGHT_F = [float(value) for value in HEIGHT]


def index_of(numpy_index):
    """numpy's strips: 0 is the bottom, then from the top (1) down to 255."""
    return 0 if numpy_index == 0 else STRIPS - numpy_index


def draws(generator, count):
    """The algorithm itself, from the raw bits of a bit generator."""
    found = []
    while len(found) < count:
        bits = int(generator.random_raw())
        strip = index_of(bits & 0xFF)
        sign = -1.0 if (bits >> 8) & 1 else 1.0
        k = (bits >> 9) & ((1 << BITS) - 1)
        x = k * WIDTH_F[strip]
        if k < LIMIT[strip]:
            found.append(sign * x)
        elif strip == 0:
            while True:
                xx = -INVERSE_R * math.log1p(-_double(generator))
                yy = -math.log1p(-_double(generator))
                if yy + yy > xx * xx:
                    found.append(-(R + xx) if (k >> 8) & 1 else R + xx)
                    break
        else:
            above = HEIGHT_F[strip + 1] if strip + 1 < STRIPS else 1.0
            if (above - HEIGHT_F[strip]) * _double(generator) + HEIGHT_F[strip] < math.exp(-0.5 * x * x):
                found.append(sign * x)
    return np.array(found)


def _double(generator):
    return (int(generator.random_raw()) >> 11) * 2.0**-53


def probability(low, high, scale):
    """Chance that scale * number, rounded, lies in [low, high), 0 < low: (value, bound on what the wedges leave open).

    Rectangles and the tail are counted exactly; a sum over a wedge is its integral up to one term.
    """
    total, open_part = mp.mpf(0), mp.mpf(0)
    unit = mp.mpf(2) ** -(BITS + 9)  # of one value of k: its bits, the sign's, the strip's
    for strip in range(STRIPS):
        if WIDTH_F[strip] * 2.0**BITS * scale < low:
            break
        first, last = (_first_in(strip, edge, scale) for edge in (low, high))
        total += unit * max(0, min(last, LIMIT[strip]) - min(first, LIMIT[strip]))
        if strip and last > LIMIT[strip]:
            above = HEIGHT[strip + 1] if strip + 1 < STRIPS else mp.mpf(1)

            def area_below(x, floor=HEIGHT[strip]):
                return mp.sqrt(mp.pi / 2) * mp.erf(x / mp.sqrt(2)) - floor * x

            ends = [WIDTH[strip] * max(k, LIMIT[strip]) for k in (first, last)]
            total += unit / WIDTH[strip] * (area_below(ends[1]) - area_below(ends[0])) / (above - HEIGHT[strip])
            open_part += unit
    if high > scale * R:
        total += _tail(low, high, scale)
    accepted = mp.sqrt(mp.pi / 2) / (AREA * STRIPS)  # of all tries
    return total / accepted, open_part / accepted


def _tail(low, high, scale):
    """k of the tail's exponential that fall into the interval, each with its chance to be accepted (at the middle)."""

    def first(edge):
        return _first(lambda k: scale * (R - INVERSE_R * math.log1p(-k * 2.0**-53)) >= edge, (1 << 53) - 1)

    a, b = first(low), first(high)
    if b <= a:
        return mp.mpf(0)
    fall = [mp.mpf(2**53 - k) / 2**53 for k in (a, b)]
    ends = [-mp.mpf(INVERSE_R) * mp.log(value) for value in fall]

    def below(x):  # of e^(-r x - x^2/2), which is what proposals times acceptance come to
        return mp.exp(mp.mpf(R) ** 2 / 2) * mp.sqrt(mp.pi / 2) * mp.erf((x + R) / mp.sqrt(2))

    whole = mp.quad(lambda x: mp.exp(-R * x - x * x / 2), [0, 2, 4, 8, 20])
    start = 1 - mp.mpf(LIMIT[0]) / mp.mpf(2) ** BITS
    return start / STRIPS / 2 * (below(ends[1]) - below(ends[0])) / whole


def _first_in(strip, edge, scale):
    return _first(lambda k: scale * (k * WIDTH_F[strip]) >= edge, 1 << BITS)


def _first(holds, end):
    """The first k in [0, end] for which a rising condition holds; end if there is none."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low

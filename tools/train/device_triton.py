"""What the Triton kernels of the assignment and of the loss share: geometry, metrics and softplus on the device."""

# ruff: noqa: N803, RET505
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-7)
EPS_INSIDE = tl.constexpr(1e-9)
EPS_NORM = tl.constexpr(1e-9)
ASPECT = tl.constexpr(0.4052847345693511)  # 4 / pi^2
LAST_ANCHOR = tl.constexpr(0x7FFFFFFF)


@triton.jit
def arctangent(y, x):
    """atan(y / x) to 1.1e-7, for one division. Polynomial in t^2, t in [0, 1], fitted at Chebyshev points."""
    a, b = tl.abs(y), tl.abs(x)
    t = tl.minimum(a, b) / tl.maximum(a, b)
    u = t * t
    p = 0.0028340641874819994 * u - 0.016005029901862144
    p = p * u + 0.042587608098983765
    p = p * u - 0.07495445758104324
    p = p * u + 0.10636754333972931
    p = p * u - 0.14202570915222168
    p = p * u + 0.19992484152317047
    p = p * u - 0.3333306610584259
    p = (p * u + 1.0) * t
    p = tl.where(a > b, 1.5707963267948966 - p, p)
    return tl.where((y < 0) != (x < 0), -p, p)


@triton.jit
def cell_of(anchor, levels, LEVELS: tl.constexpr):
    """Centre (x, y) of an anchor's cell in units of its stride, and the stride in pixels, as float32."""
    start = anchor * 0
    columns = start + 1
    stride = start
    for level in tl.static_range(LEVELS):
        offset = tl.load(levels + 4 * level)
        here = anchor >= offset
        start = tl.where(here, offset, start)
        columns = tl.where(here, tl.load(levels + 4 * level + 2), columns)
        stride = tl.where(here, tl.load(levels + 4 * level + 3), stride)
    local = anchor - start
    return (local % columns).to(tl.float32) + 0.5, (local // columns).to(tl.float32) + 0.5, stride.to(tl.float32)


@triton.jit
def target_box(targets, mask, at, width, height):
    """Pixel xyxy of target `at` (picture * M + box), and whether it is real."""
    w = tl.load(targets + at * 5 + 3) * width
    h = tl.load(targets + at * 5 + 4) * height
    x = tl.load(targets + at * 5 + 1) * width
    y = tl.load(targets + at * 5 + 2) * height
    x1, y1, x2, y2 = x - w * 0.5, y - h * 0.5, x + w * 0.5, y + h * 0.5
    return x1, y1, x2, y2, (tl.load(mask + at) != 0) & (x1 + y1 + x2 + y2 > 0)


@triton.jit
def raised(low, high, floor):
    """One axis of a box for the test of being inside: sides below `floor` are raised to it."""
    half = tl.where(high - low < floor, floor, high - low) * 0.5
    centre = (low + high) * 0.5
    return centre - half, centre + half


@triton.jit
def is_inside(x, y, left, top, right, bottom):
    return (x - left > EPS_INSIDE) & (y - top > EPS_INSIDE) & (right - x > EPS_INSIDE) & (bottom - y > EPS_INSIDE)


@triton.jit
def overlap_of(gx1, gy1, gx2, gy2, g_angle, px1, py1, px2, py2, p_angle):
    """CIoU of a target and a prediction; 0 where it is negative or NaN."""
    iw = tl.maximum(tl.minimum(gx2, px2) - tl.maximum(gx1, px1), 0.0)
    ih = tl.maximum(tl.minimum(gy2, py2) - tl.maximum(gy1, py1), 0.0)
    inter = iw * ih
    iou = inter / ((gx2 - gx1) * (gy2 - gy1 + EPS) + (px2 - px1) * (py2 - py1 + EPS) - inter + EPS)
    cw = tl.maximum(gx2, px2) - tl.minimum(gx1, px1)
    ch = tl.maximum(gy2, py2) - tl.minimum(gy1, py1)
    dx = px1 + px2 - gx1 - gx2
    dy = py1 + py2 - gy1 - gy2
    angle = p_angle - g_angle
    aspect = angle * angle * ASPECT
    penalty = (dx * dx + dy * dy) * 0.25 / (cw * cw + ch * ch + EPS) + aspect * (aspect / (1.0 - iou + aspect + EPS))
    value = iou - penalty
    return tl.where(value > 0, value, 0.0)


@triton.jit
def metric_of(logit, overlap):
    """sigmoid(logit) ** 0.5 * overlap ** 6; NaN counts as 0."""
    square = overlap * overlap
    value = tl.sqrt(1.0 / (1.0 + tl.exp(-logit))) * (square * square * square)
    return tl.where(value > 0, value, 0.0)


@triton.jit
def key_of(metric, anchor):
    """One integer that orders by metric (a float32, not negative), then by the lower anchor."""
    return (metric.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (anchor ^ LAST_ANCHOR).to(tl.int64)


@triton.jit
def soft_target(metric, overlap, anchor, winner, top_overlap, ONE: tl.constexpr):
    """Soft target of an entry from its owner's maxima. ONE: the owner keeps only its best entry (topk2 = 1)."""
    if ONE:
        kept = (metric > 0) & (key_of(metric, anchor) == winner)
        return tl.where(kept, metric * overlap / (metric + EPS_NORM), 0.0)
    else:
        top = (winner >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return metric * top_overlap.to(tl.float32, bitcast=True) / (top + EPS_NORM)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to float32 rounding also where it is about exp(x): log1p(u) = 2 atanh(u / (2 + u))."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    q = s * s
    p = 0.07692307692307693 * q + 0.09090909090909091
    p = p * q + 0.1111111111111111
    p = p * q + 0.14285714285714285
    p = p * q + 0.2
    p = p * q + 0.3333333333333333
    return tl.maximum(x, 0.0) + 2.0 * s * (p * q + 1.0)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def share_of_less(a, b):
    """Derivative of min(a, b) to a, as autograd has it: a half on ties."""
    return tl.where(a < b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def ciou_gradient(px1, py1, px2, py2, tx1, ty1, tx2, ty2):
    """CIoU of prediction and target and its gradient to the prediction's corners; the aspect weight is a constant."""
    w, h = px2 - px1, py2 - py1 + EPS
    tw, th = tx2 - tx1, ty2 - ty1 + EPS
    dx = tl.minimum(px2, tx2) - tl.maximum(px1, tx1)
    dy = tl.minimum(py2, ty2) - tl.maximum(py1, ty1)
    iw, ih = tl.maximum(dx, 0.0), tl.maximum(dy, 0.0)
    inter = iw * ih
    union = w * h + tw * th - inter + EPS
    iou = inter / union
    cw = tl.maximum(px2, tx2) - tl.minimum(px1, tx1)
    ch = tl.maximum(py2, ty2) - tl.minimum(py1, ty1)
    diagonal = cw * cw + ch * ch + EPS
    sx, sy = tx1 + tx2 - px1 - px2, ty1 + ty2 - py1 - py2
    distance = (sx * sx + sy * sy) * 0.25
    angle = arctangent(tw, th) - arctangent(w, h)
    aspect = angle * angle * ASPECT
    weight = aspect / (1.0 - iou + aspect + EPS)
    value = iou - (distance / diagonal + aspect * weight)

    by_inter = (union + inter) / (union * union)
    by_area = -inter / (union * union)
    by_diagonal = distance / (diagonal * diagonal)
    by_angle = weight * 2.0 * angle * ASPECT / (w * w + h * h)  # of -aspect * weight, to the predicted angle
    by_w = by_area * h + by_angle * h
    by_h = by_area * w - by_angle * w
    by_iw = tl.where(dx >= 0, by_inter * ih, 0.0)
    by_ih = tl.where(dy >= 0, by_inter * iw, 0.0)
    by_cw, by_ch = 2.0 * cw * by_diagonal, 2.0 * ch * by_diagonal
    by_cx, by_cy = sx * 0.5 / diagonal, sy * 0.5 / diagonal
    gx1 = -by_iw * share_of_less(tx1, px1) - by_w - by_cw * share_of_less(px1, tx1) + by_cx
    gy1 = -by_ih * share_of_less(ty1, py1) - by_h - by_ch * share_of_less(py1, ty1) + by_cy
    gx2 = by_iw * share_of_less(px2, tx2) + by_w + by_cw * share_of_less(tx2, px2) + by_cx
    gy2 = by_ih * share_of_less(py2, ty2) + by_h + by_ch * share_of_less(ty2, py2) + by_cy
    return value, gx1, gy1, gx2, gy2


@triton.jit
def bin_share(wanted, number, REG_MAX: tl.constexpr):
    """Share of bin `number` in a wanted distance, which goes to the two bins around it."""
    wanted = tl.minimum(tl.maximum(wanted, 0.0), REG_MAX - 1 - 0.01)
    return tl.maximum(1.0 - tl.abs(wanted - number), 0.0)


@triton.jit
def bin_sums(bins, stride_c, on, REG_MAX: tl.constexpr):
    """Of each lane's bins: the largest logit, and the sum of exp(logit - largest)."""
    largest = tl.load(bins, mask=on, other=0.0).to(tl.float32)
    for i in range(1, REG_MAX):
        largest = tl.maximum(largest, tl.load(bins + i * stride_c, mask=on, other=0.0).to(tl.float32))
    total = largest * 0.0
    for i in range(REG_MAX):
        total += tl.exp(tl.load(bins + i * stride_c, mask=on, other=0.0).to(tl.float32) - largest)
    return largest, total

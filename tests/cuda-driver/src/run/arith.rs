//! Arithmetic on the bits of registers (PTX ISA 9.0, 9.7.1 to 9.7.9).

use std::cmp::Ordering;

use super::program::{Binary, Compare, Mode, Relation, Round, Ternary, Unary};
use crate::ptx::Type;

/// Mask of the bits of a size in bytes.
pub fn mask(size: u8) -> u64 {
    match size {
        1 => 0xff,
        2 => 0xffff,
        4 => 0xffff_ffff,
        _ => u64::MAX,
    }
}

/// The value reduced to the bits of a type. A predicate has one bit.
pub fn masked(of: Type, value: u64) -> u64 {
    match of {
        Type::Pred => value & 1,
        of => value & mask(of.size()),
    }
}

/// The value sign- or zero-extended according to its type.
pub fn extended(of: Type, value: u64) -> u64 {
    match of {
        Type::S(size) => signed(size, value).cast_unsigned(),
        of => masked(of, value),
    }
}

fn signed(size: u8, value: u64) -> i64 {
    let shift = 64 - 8 * u32::from(size);
    (value << shift).cast_signed() >> shift
}

fn wide(of: Type, value: u64) -> i128 {
    match of {
        Type::S(size) => i128::from(signed(size, value)),
        of => i128::from(masked(of, value)),
    }
}

/// The low bits of a wide number.
fn low(value: i128) -> u64 {
    // Truncation is intended: registers wrap.
    #[allow(clippy::cast_possible_truncation)]
    {
        value.cast_unsigned() as u64
    }
}

pub fn f32_of(bits: u64) -> f32 {
    f32::from_bits((bits & 0xffff_ffff) as u32)
}

fn flush32(value: f32, mode: Mode) -> f32 {
    if mode.ftz && value.is_subnormal() {
        0f32.copysign(value)
    } else {
        value
    }
}

fn in32(bits: u64, mode: Mode) -> f32 {
    flush32(f32_of(bits), mode)
}

fn out32(value: f32, mode: Mode) -> u64 {
    let value = flush32(value, mode);
    let value = match mode.sat {
        true if value.is_nan() => 0.0,
        true => value.clamp(0.0, 1.0),
        false => value,
    };
    // The device has only one NaN.
    let bits = if value.is_nan() {
        0x7fff_ffff
    } else {
        value.to_bits()
    };
    u64::from(bits)
}

/// The sum of two doubles, rounded to a single as the instruction specifies.
fn sum32(x: f64, y: f64, round: Round) -> f32 {
    let sum = x + y;
    #[allow(clippy::cast_possible_truncation)]
    let nearest = sum as f32;
    if round == Round::Nearest || !sum.is_finite() {
        return nearest;
    }
    // The exact rounding error of the addition (Knuth's two-sum). It decides only where nothing
    // else does.
    let part = sum - x;
    let lost = (x - (sum - part)) + (y - part);
    let beyond = sum - f64::from(nearest);
    let beyond = if beyond == 0.0 { lost } else { beyond };
    let down = match round {
        Round::Down => true,
        Round::Up => false,
        _ => nearest > 0.0,
    };
    match (beyond < 0.0, beyond > 0.0) {
        (true, _) if down => nearest.next_down(),
        (_, true) if !down => nearest.next_up(),
        _ => nearest,
    }
}

fn out64(value: f64) -> u64 {
    if value.is_nan() {
        0x7ff8_0000_0000_0000
    } else {
        value.to_bits()
    }
}

/// Operations with one operand.
pub fn unary(op: Unary, of: Type, mode: Mode, a: u64) -> u64 {
    match of {
        Type::F(4) => {
            let value = in32(a, mode);
            match op {
                // The sign of NaN changes, too: these operations work on bits.
                Unary::Neg if value.is_nan() => u64::from(value.to_bits() ^ 1 << 31),
                Unary::Abs if value.is_nan() => u64::from(value.to_bits() & !(1 << 31)),
                Unary::Neg => out32(-value, mode),
                Unary::Abs => out32(value.abs(), mode),
                Unary::Sqrt => out32(value.sqrt(), mode),
                Unary::Rsqrt => out32(1.0 / value.sqrt(), mode),
                Unary::Rcp => out32(1.0 / value, mode),
                Unary::Sin => out32(value.sin(), mode),
                Unary::Cos => out32(value.cos(), mode),
                Unary::Ex2 => out32(value.exp2(), mode),
                Unary::Lg2 => out32(value.log2(), mode),
                Unary::Tanh => out32(value.tanh(), mode),
                _ => bits(op, of, a),
            }
        }
        Type::F(8) => {
            let value = f64::from_bits(a);
            match op {
                Unary::Neg => (-value).to_bits(),
                Unary::Abs => value.abs().to_bits(),
                Unary::Sqrt => out64(value.sqrt()),
                Unary::Rsqrt => out64(1.0 / value.sqrt()),
                Unary::Rcp => out64(1.0 / value),
                _ => bits(op, of, a),
            }
        }
        _ => bits(op, of, a),
    }
}

fn bits(op: Unary, of: Type, a: u64) -> u64 {
    let size = of.size();
    let width = 8 * u32::from(size);
    let own = masked(of, a);
    let zeros = |value: u64| u64::from(value.leading_zeros() - (64 - width));
    match op {
        Unary::Neg => masked(of, own.wrapping_neg()),
        Unary::Abs => masked(of, signed(size, own).unsigned_abs()),
        Unary::Not => masked(of, !own),
        Unary::Cnot => u64::from(own == 0),
        Unary::Popc => u64::from(own.count_ones()),
        Unary::Clz => zeros(own),
        Unary::Brev => own.reverse_bits() >> (64 - width),
        Unary::Bfind | Unary::BfindShift => {
            // The highest bit that differs from the sign.
            let value = match of {
                Type::S(_) if signed(size, own) < 0 => masked(of, !own),
                _ => own,
            };
            match (value, op) {
                (0, _) => mask(4),
                (_, Unary::BfindShift) => zeros(value),
                _ => u64::from(width) - 1 - zeros(value),
            }
        }
        _ => 0,
    }
}

/// Operations with two operands.
pub fn binary(op: Binary, of: Type, mode: Mode, a: u64, b: u64) -> u64 {
    match of {
        Type::F(4) => {
            let (x, y) = (in32(a, mode), in32(b, mode));
            let value = match op {
                Binary::Add if mode.round != Round::Nearest => {
                    sum32(x.into(), y.into(), mode.round)
                }
                Binary::Sub if mode.round != Round::Nearest => {
                    sum32(x.into(), -f64::from(y), mode.round)
                }
                // The product of singles is exact.
                Binary::MulLo if mode.round != Round::Nearest => {
                    sum32(f64::from(x) * f64::from(y), 0.0, mode.round)
                }
                Binary::Add => x + y,
                Binary::Sub => x - y,
                Binary::MulLo => x * y,
                Binary::Div => x / y,
                // If one operand is NaN, the other one.
                Binary::Min => least(x, y, x.min(y)),
                Binary::Max => -least(-x, -y, -(x.max(y))),
                Binary::MinNan | Binary::MaxNan if x.is_nan() || y.is_nan() => f32::NAN,
                Binary::MinNan => least(x, y, x.min(y)),
                Binary::MaxNan => -least(-x, -y, -(x.max(y))),
                // The sign comes from the first operand.
                Binary::CopySign => return u64::from(f32_of(b).copysign(f32_of(a)).to_bits()),
                _ => return integer(op, of, mode, a, b),
            };
            out32(value, mode)
        }
        Type::F(8) => {
            let (x, y) = (f64::from_bits(a), f64::from_bits(b));
            let value = match op {
                Binary::Add => x + y,
                Binary::Sub => x - y,
                Binary::MulLo => x * y,
                Binary::Div => x / y,
                Binary::Min | Binary::MinNan => x.min(y),
                Binary::Max | Binary::MaxNan => x.max(y),
                Binary::CopySign => return y.copysign(x).to_bits(),
                _ => return integer(op, of, mode, a, b),
            };
            out64(value)
        }
        _ => integer(op, of, mode, a, b),
    }
}

/// The minimum, with negative zero less than zero.
fn least(x: f32, y: f32, otherwise: f32) -> f32 {
    if x == 0.0 && y == 0.0 && (x.is_sign_negative() || y.is_sign_negative()) {
        -0.0
    } else {
        otherwise
    }
}

fn integer(op: Binary, of: Type, mode: Mode, a: u64, b: u64) -> u64 {
    let size = of.size();
    let width = 8 * u64::from(size);
    let (x, y) = (wide(of, a), wide(of, b));
    // A shift amount has 32 bits and does not wrap.
    let amount = b & mask(4);
    let value = match op {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::MulLo => return masked(of, a.wrapping_mul(b)),
        Binary::MulHi => match of {
            Type::S(_) => (x * y) >> width,
            _ => return masked(of, high(x, y, width)),
        },
        Binary::MulWide => return low(x.wrapping_mul(y)) & mask(size.saturating_mul(2)),
        // Undefined on the device: all ones, as hardware does.
        Binary::Div => x.checked_div(y).unwrap_or(-1),
        Binary::Rem => x.checked_rem(y).unwrap_or(x),
        Binary::Min => x.min(y),
        Binary::Max => x.max(y),
        Binary::And => return masked(of, a & b),
        Binary::Or => return masked(of, a | b),
        Binary::Xor => return masked(of, a ^ b),
        Binary::Shl if amount >= width => 0,
        Binary::Shl => return masked(of, a << amount),
        Binary::Shr => {
            x >> amount
                .min(width.max(1) - u64::from(matches!(of, Type::S(_))))
                .min(127)
        }
        _ => 0,
    };
    if mode.sat {
        let value = value.clamp(i128::from(i32::MIN), i128::from(i32::MAX));
        return masked(of, low(value));
    }
    masked(of, low(value))
}

fn high(x: i128, y: i128, width: u64) -> u64 {
    let product = x.cast_unsigned().wrapping_mul(y.cast_unsigned());
    low((product >> width).cast_signed())
}

/// A sum with carries: the bits, and what is carried out.
pub fn carried(subtract: bool, of: Type, a: u64, b: u64, carry: bool) -> (u64, bool) {
    let (a, b) = (u128::from(masked(of, a)), u128::from(masked(of, b)));
    let width = 8 * u32::from(of.size());
    let carry = u128::from(carry);
    // A borrow is what the carry is to a difference.
    let value = if subtract {
        a.wrapping_sub(b).wrapping_sub(carry)
    } else {
        a + b + carry
    };
    (
        masked(of, low(value.cast_signed())),
        value >> width & 1 != 0,
    )
}

/// Operations of three operands.
pub fn ternary(op: Ternary, of: Type, mode: Mode, a: u64, b: u64, c: u64) -> u64 {
    let add = |x: u64, y: u64, of| binary(Binary::Add, of, mode, x, y);
    let plain = Mode::default();
    match op {
        Ternary::Fma if of == Type::F(4) && mode.round != Round::Nearest => {
            let product = f64::from(in32(a, mode)) * f64::from(in32(b, mode));
            out32(sum32(product, in32(c, mode).into(), mode.round), mode)
        }
        Ternary::Fma if of == Type::F(4) => {
            out32(in32(a, mode).mul_add(in32(b, mode), in32(c, mode)), mode)
        }
        Ternary::Fma => out64(f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c))),
        Ternary::MadLo => add(binary(Binary::MulLo, of, plain, a, b), c, of),
        Ternary::MadHi => add(binary(Binary::MulHi, of, plain, a, b), c, of),
        Ternary::MadWide => {
            let wide = mask(of.size().saturating_mul(2));
            binary(Binary::MulWide, of, plain, a, b).wrapping_add(c) & wide
        }
        Ternary::Bfe => extract(of, a, b, c),
        Ternary::Prmt => permute(a, b, c),
        Ternary::Lop3(table) => {
            let chosen = |bit: u8| {
                let pick = |value: u64, wanted: bool| if wanted { value } else { !value };
                pick(a, bit & 4 != 0) & pick(b, bit & 2 != 0) & pick(c, bit & 1 != 0)
            };
            let all = (0..8).filter(|bit| table >> bit & 1 != 0);
            all.fold(0, |value, bit| value | chosen(bit)) & mask(4)
        }
        Ternary::ShiftLeft { wrap } => {
            let amount = shift(c, wrap);
            let pair = (b & mask(4)) << 32 | a & mask(4);
            pair.checked_shl(amount).unwrap_or(0) >> 32
        }
        Ternary::ShiftRight { wrap } => {
            let pair = (b & mask(4)) << 32 | a & mask(4);
            pair >> shift(c, wrap) & mask(4)
        }
        Ternary::Sad => {
            let distance = (wide(of, a) - wide(of, b)).unsigned_abs();
            masked(of, low(distance.cast_signed()).wrapping_add(c))
        }
        Ternary::Dp4a { unsigned_b } => {
            let part = |of: Type, value: u64, at: u32| {
                let byte = value >> (8 * at);
                match of {
                    Type::S(_) => wide(Type::S(1), byte),
                    _ => wide(Type::U(1), byte),
                }
            };
            let of_b = if unsigned_b { Type::U(4) } else { Type::S(4) };
            let sum: i128 = (0..4).map(|at| part(of, a, at) * part(of_b, b, at)).sum();
            low(sum).wrapping_add(c) & mask(4)
        }
    }
}

fn shift(amount: u64, wrap: bool) -> u32 {
    let amount = amount & mask(4);
    let amount = if wrap { amount & 31 } else { amount.min(32) };
    u32::try_from(amount).unwrap_or(32)
}

fn extract(of: Type, a: u64, position: u64, length: u64) -> u64 {
    let width = 8 * u64::from(of.size());
    let (position, length) = (position & 0xff, length & 0xff);
    let own = extended(of, a);
    let sign = || {
        let last = (position + length).saturating_sub(1).min(width - 1);
        matches!(of, Type::S(_)) && length > 0 && own >> last & 1 != 0
    };
    let field = if position >= width {
        0
    } else {
        masked(of, own) >> position
    };
    let length = length.min(width.saturating_sub(position));
    let kept = if length >= 64 {
        u64::MAX
    } else {
        (1 << length) - 1
    };
    let value = field & kept;
    masked(of, if sign() { value | !kept } else { value })
}

/// Replaces bits of `b` by those of `a`.
pub fn insert(size: u8, a: u64, b: u64, position: u64, length: u64) -> u64 {
    let width = 8 * u64::from(size);
    let (position, length) = (position & 0xff, length & 0xff);
    if position >= width || length == 0 {
        return b & mask(size);
    }
    let kept = if length >= 64 {
        u64::MAX
    } else {
        (1 << length) - 1
    };
    let place = kept << position;
    (b & !place | a << position & place) & mask(size)
}

fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = (b & mask(4)) << 32 | a & mask(4);
    (0..4).fold(0, |value, at| {
        let select = selector >> (4 * at);
        let byte = bytes >> (8 * (select & 7)) & 0xff;
        let byte = match select & 8 {
            0 => byte,
            _ if byte & 0x80 != 0 => 0xff,
            _ => 0,
        };
        value | byte << (8 * at)
    })
}

/// Whether a comparison holds.
pub fn compare(how: Compare, of: Type, ftz: bool, a: u64, b: u64) -> bool {
    let mode = Mode {
        ftz,
        ..Mode::default()
    };
    let order = match of {
        Type::F(4) => in32(a, mode).partial_cmp(&in32(b, mode)),
        Type::F(8) => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
        of => wide(of, a).partial_cmp(&wide(of, b)),
    };
    match (how, order) {
        (Compare::Numbers, order) => order.is_some(),
        (Compare::NotNumbers, order) => order.is_none(),
        (Compare::Unordered(_), None) => true,
        (Compare::Ordered(_), None) => false,
        (Compare::Ordered(relation) | Compare::Unordered(relation), Some(order)) => {
            match relation {
                Relation::Eq => order == Ordering::Equal,
                Relation::Ne => order != Ordering::Equal,
                Relation::Lt => order == Ordering::Less,
                Relation::Le => order != Ordering::Greater,
                Relation::Gt => order == Ordering::Greater,
                Relation::Ge => order != Ordering::Less,
            }
        }
    }
}

/// Whether a float is of a class of `testp`.
pub fn class(of: Type, class: &str, a: u64) -> bool {
    let value = if of == Type::F(4) {
        f64::from(f32_of(a))
    } else {
        f64::from_bits(a)
    };
    let subnormal = if of == Type::F(4) {
        f32_of(a).is_subnormal()
    } else {
        value.is_subnormal()
    };
    match class {
        "finite" => value.is_finite(),
        "infinite" => value.is_infinite(),
        "number" => !value.is_nan(),
        "notanumber" => value.is_nan(),
        "subnormal" => subnormal,
        _ => value.is_finite() && value != 0.0 && !subnormal,
    }
}

/// Conversions.
pub fn convert(
    to: Type,
    from: Type,
    round: Option<Round>,
    to_integer: bool,
    mode: Mode,
    a: u64,
) -> u64 {
    let value = match from {
        Type::F(8) => f64::from_bits(a),
        Type::F(4) => f64::from(in32(a, mode)),
        Type::F(_) => f64::from(f32::from_bits(half_to_single(a))),
        _ => return from_integer(to, mode, wide(from, a)),
    };
    let rounded = || match round {
        Some(Round::Nearest) => value.round_ties_even(),
        Some(Round::Down) => value.floor(),
        Some(Round::Up) => value.ceil(),
        Some(Round::Zero) | None => value.trunc(),
    };
    match to {
        Type::F(size) => float_out(size, if to_integer { rounded() } else { value }, mode),
        // Out of range is the nearest value, and what is no number is 0: as Rust's conversions.
        #[allow(clippy::cast_possible_truncation)]
        Type::S(size) => {
            let (least, most) = (
                i64::MIN >> (64 - 8 * u32::from(size)),
                i64::MAX >> (64 - 8 * u32::from(size)),
            );
            masked(to, (rounded() as i64).clamp(least, most).cast_unsigned())
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        to => (rounded() as u64).min(mask(to.size())),
    }
}

fn from_integer(to: Type, mode: Mode, value: i128) -> u64 {
    match to {
        // One rounding, from the integer: not by way of another float.
        #[allow(clippy::cast_precision_loss)]
        Type::F(4) => out32(value as f32, mode),
        #[allow(clippy::cast_precision_loss)]
        Type::F(size) => float_out(size, value as f64, mode),
        to if mode.sat => {
            let width = 8 * u32::from(to.size());
            let (least, most) = match to {
                Type::S(_) => (-(1i128 << (width - 1)), (1i128 << (width - 1)) - 1),
                _ => (0, (1i128 << width) - 1),
            };
            masked(to, low(value.clamp(least, most)))
        }
        // Registers are wider than some types: the sign goes on.
        to => extended(to, low(value)),
    }
}

#[allow(clippy::cast_possible_truncation)]
fn float_out(size: u8, value: f64, mode: Mode) -> u64 {
    match size {
        8 if mode.sat => out64(if value.is_nan() {
            0.0
        } else {
            value.clamp(0.0, 1.0)
        }),
        8 => out64(value),
        4 => out32(sum32(value, 0.0, mode.round), mode),
        _ => u64::from(half_from_double(value)),
    }
}

fn half_to_single(bits: u64) -> u32 {
    let (sign, exponent, fraction) = (bits >> 15 & 1, bits >> 10 & 0x1f, bits & 0x3ff);
    let magnitude = match exponent {
        0 => {
            #[allow(clippy::cast_precision_loss)]
            let value = fraction as f32 / 16_777_216.0;
            value.to_bits()
        }
        31 => 0x7f80_0000 | (fraction as u32) << 13,
        _ => ((exponent as u32) + 112) << 23 | (fraction as u32) << 13,
    };
    (sign as u32) << 31 | magnitude
}

fn half_from_double(value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let size = value.abs();
    if value.is_nan() {
        return 0x7fff;
    }
    if size >= 65520.0 {
        return sign | 0x7c00;
    }
    // Units of the last place: fixed below the smallest normal number.
    let exponent = (((size.to_bits() >> 52) as i32) - 1023).max(-14);
    let units = (size * f64::powi(2.0, 10 - exponent)).round_ties_even();
    // At most 2048: rounding up to the next power carries into the exponent by itself.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let units = units as u16;
    let biased = u16::try_from(exponent + 14).unwrap_or(0) << 10;
    sign | (biased + units)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_beyond_the_width_clear_or_keep_the_sign() {
        let plain = Mode::default();
        assert_eq!(binary(Binary::Shl, Type::B(4), plain, 1, 40), 0);
        assert_eq!(binary(Binary::Shr, Type::U(4), plain, 0x8000_0000, 32), 0);
        assert_eq!(
            binary(Binary::Shr, Type::S(4), plain, 0x8000_0000, 99),
            0xffff_ffff
        );
        assert_eq!(binary(Binary::Shr, Type::U(8), plain, u64::MAX, 64), 0);
        assert_eq!(
            ternary(
                Ternary::ShiftLeft { wrap: false },
                Type::B(4),
                plain,
                0x8000_0000,
                1,
                1
            ),
            3
        );
        assert_eq!(
            ternary(
                Ternary::ShiftRight { wrap: true },
                Type::B(4),
                plain,
                1,
                1,
                33
            ),
            0x8000_0000
        );
    }

    #[test]
    fn products_have_high_and_wide_halves() {
        let plain = Mode::default();
        assert_eq!(
            binary(Binary::MulHi, Type::U(8), plain, u64::MAX, u64::MAX),
            u64::MAX - 1
        );
        assert_eq!(
            binary(Binary::MulHi, Type::S(8), plain, u64::MAX, u64::MAX),
            0
        );
        assert_eq!(
            binary(Binary::MulHi, Type::S(4), plain, 0x8000_0000, 2),
            0xffff_ffff
        );
        assert_eq!(
            binary(Binary::MulWide, Type::S(4), plain, 0xffff_ffff, 2),
            (-2i64).cast_unsigned()
        );
    }

    #[test]
    fn bit_fields_are_taken_and_put() {
        assert_eq!(extract(Type::U(4), 0xabcd_1234, 8, 8), 0x12);
        assert_eq!(extract(Type::S(4), 0x0000_8000, 8, 8), 0xffff_ff80);
        assert_eq!(insert(4, 0xff, 0, 8, 4), 0xf00);
        assert_eq!(insert(8, 1, 0, 63, 8), 1 << 63);
        assert_eq!(permute(0x4433_2211, 0x8877_6655, 0x7410), 0x8855_2211);
    }

    #[test]
    fn lookup_tables_of_three_inputs() {
        let xor = ternary(
            Ternary::Lop3(0x96),
            Type::B(4),
            Mode::default(),
            0xf0,
            0xcc,
            0xaa,
        );
        assert_eq!(xor, 0x96);
    }

    #[test]
    fn carries_go_from_one_half_to_the_other() {
        assert_eq!(carried(false, Type::U(4), 0xffff_ffff, 1, false), (0, true));
        assert_eq!(carried(false, Type::U(8), u64::MAX, 0, true), (0, true));
        assert_eq!(carried(true, Type::U(4), 0, 1, false), (0xffff_ffff, true));
    }

    #[test]
    fn conversions_clamp_and_round_once() {
        let plain = Mode::default();
        let f = |value: f32| u64::from(value.to_bits());
        assert_eq!(
            convert(
                Type::S(4),
                Type::F(4),
                Some(Round::Zero),
                true,
                plain,
                f(3e9)
            ),
            0x7fff_ffff
        );
        assert_eq!(
            convert(
                Type::U(4),
                Type::F(4),
                Some(Round::Zero),
                true,
                plain,
                f(-1.0)
            ),
            0
        );
        assert_eq!(
            convert(
                Type::S(4),
                Type::F(4),
                Some(Round::Nearest),
                true,
                plain,
                f(2.5)
            ),
            2
        );
        // 2^60 + 1 rounds up to an odd double first, if it goes that way.
        let big = (1u64 << 60) + (1 << 36) + 1;
        let once = convert(
            Type::F(4),
            Type::U(8),
            Some(Round::Nearest),
            false,
            plain,
            big,
        );
        assert_eq!(once, u64::from((big as f32).to_bits()));
    }

    #[test]
    fn directed_rounding_sees_what_a_sum_loses() {
        let (one, tiny) = (1f64, 2f64.powi(-100));
        assert_eq!(sum32(one, -tiny, Round::Down), 1f32.next_down());
        assert_eq!(sum32(one, -tiny, Round::Up), 1.0);
        assert_eq!(sum32(one, tiny, Round::Up), 1f32.next_up());
        assert_eq!(sum32(-one, tiny, Round::Zero), (-1f32).next_up());
        assert_eq!(sum32(-one, tiny, Round::Nearest), -1.0);
        assert_eq!(sum32(f64::MAX, 0.0, Round::Zero), f32::MAX);
        assert_eq!(sum32(0.1, 0.0, Round::Down), 0.1f32.next_down());
    }

    #[test]
    fn halves_keep_their_value() {
        for bits in 0..0x7c00u64 {
            let single = f32::from_bits(half_to_single(bits));
            assert_eq!(u64::from(half_from_double(f64::from(single))), bits);
        }
        assert_eq!(half_from_double(65519.9), 0x7bff);
        assert_eq!(half_from_double(-1e9), 0xfc00);
    }
}

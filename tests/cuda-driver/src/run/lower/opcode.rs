//! Opcodes: decodes the instruction in a line of PTX.

use super::Lowering;
use crate::ptx::{Error, Instruction, Operand, Space, Type};
use crate::run::program::{
    Atomic, BarrierResult, Binary, Compare, Logic, Mode, Op, Reg, Relation, Round, Shuffle, Src,
    Ternary, Together, Unary, Vote,
};

/// An opcode's parts and its operands.
struct Form<'a> {
    parts: &'a [String],
    operands: &'a [Operand],
}

impl Form<'_> {
    fn has(&self, part: &str) -> bool {
        self.parts.iter().any(|own| own == part)
    }

    /// All types, in order.
    fn types(&self) -> Vec<Type> {
        self.parts
            .iter()
            .filter_map(|part| Type::named(part))
            .collect()
    }

    fn space(&self) -> Space {
        let named = self.parts.iter().find_map(|part| {
            Some(match part.split("::").next()? {
                "global" => Space::Global,
                "const" => Space::Const,
                "shared" => Space::Shared,
                "local" => Space::Local,
                "param" => Space::Param,
                _ => return None,
            })
        });
        named.unwrap_or(Space::Generic)
    }

    fn mode(&self) -> Mode {
        Mode {
            ftz: self.has("ftz"),
            sat: self.has("sat"),
            round: self.round().unwrap_or_default(),
        }
    }

    fn round(&self) -> Option<Round> {
        self.parts.iter().find_map(|part| {
            Some(match part.as_str() {
                "rn" | "rni" => Round::Nearest,
                "rz" | "rzi" => Round::Zero,
                "rm" | "rmi" => Round::Down,
                "rp" | "rpi" => Round::Up,
                _ => return None,
            })
        })
    }

    fn operand(&self, at: usize) -> &Operand {
        const NONE: &Operand = &Operand::Group(Vec::new());
        self.operands.get(at).unwrap_or(NONE)
    }
}

/// Decodes an instruction.
///
/// # Errors
/// The instruction is not supported; the error names it.
pub fn decode(low: &mut Lowering<'_>, instruction: &Instruction) -> Result<Op, Error> {
    let form = Form {
        parts: &instruction.opcode,
        operands: &instruction.operands,
    };
    match op(low, &form)? {
        Some(op) => Ok(op),
        None => low.error(format!(
            "the instruction {} is not supported",
            form.parts.join(".")
        )),
    }
}

fn op(low: &mut Lowering<'_>, form: &Form<'_>) -> Result<Option<Op>, Error> {
    let types = form.types();
    let of = types.last().copied();
    let name = form.parts.first().map_or("", String::as_str);
    Ok(Some(match name {
        "ret" => Op::Return,
        "exit" => Op::Exit,
        "trap" => Op::Trap,
        "brkpt" | "pmevent" | "prefetch" | "prefetchu" | "discard" | "applypriority"
        | "createpolicy" | "griddepcontrol" | "setmaxnreg" => Op::Nothing,
        "nanosleep" => Op::Yield,
        "membar" | "fence" => Op::Fence,
        "bra" => Op::Branch(low.label(form.operand(0))?),
        "brx" => Op::BranchIndexed {
            index: low.source(form.operand(0))?,
            to: low.labels(form.operand(1))?,
        },
        "call" => low.call(form.operands)?,
        "mov" => return mov(low, form, of),
        "ld" | "ldu" => return load(low, form, of),
        "st" => return store(low, form, of),
        "cvta" => return cvta(low, form),
        "isspacep" => Op::IsSpace {
            space: form.space(),
            d: low.register(form.operand(0))?,
            a: low.source(form.operand(1))?,
        },
        "setp" => return setp(low, form, of),
        "set" => return set(low, form, &types),
        "selp" => {
            let Some(of) = of else { return Ok(None) };
            Op::Select {
                size: of.size(),
                d: low.register(form.operand(0))?,
                a: low.source(form.operand(1))?,
                b: low.source(form.operand(2))?,
                p: low.source(form.operand(3))?,
            }
        }
        "slct" => {
            let [of, by] = types[..] else { return Ok(None) };
            Op::SelectSign {
                size: of.size(),
                by,
                d: low.register(form.operand(0))?,
                a: low.source(form.operand(1))?,
                b: low.source(form.operand(2))?,
                c: low.source(form.operand(3))?,
            }
        }
        "testp" => {
            const CLASSES: [&str; 6] = [
                "finite",
                "infinite",
                "number",
                "notanumber",
                "normal",
                "subnormal",
            ];
            let class = CLASSES.into_iter().find(|class| form.has(class));
            let (Some(of), Some(class)) = (of, class) else {
                return Ok(None);
            };
            Op::NotANumber {
                of,
                class,
                d: low.register(form.operand(0))?,
                a: low.source(form.operand(1))?,
            }
        }
        "cvt" => return cvt(low, form, &types),
        "bar" | "barrier" => return barrier(low, form),
        "vote" | "shfl" | "match" | "redux" | "activemask" | "elect" => {
            return together(low, form, of);
        }
        "atom" | "red" => return atomic(low, form, of),
        "cp" => return copy(low, form),
        "bfi" => {
            let Some(of) = of else { return Ok(None) };
            Op::BitInsert {
                size: of.size(),
                d: low.register(form.operand(0))?,
                a: low.source(form.operand(1))?,
                b: low.source(form.operand(2))?,
                c: low.source(form.operand(3))?,
                e: low.source(form.operand(4))?,
            }
        }
        _ => return arithmetic(low, form, name, of),
    }))
}

fn arithmetic(
    low: &mut Lowering<'_>,
    form: &Form<'_>,
    name: &str,
    of: Option<Type>,
) -> Result<Option<Op>, Error> {
    let Some(of) = of else { return Ok(None) };
    let float = matches!(of, Type::F(_));
    // Directed rounding is supported where two doubles represent the exact result.
    let directed = form.round().is_some_and(|round| round != Round::Nearest);
    let exact = of == Type::F(4) && matches!(name, "add" | "sub" | "mul" | "mad" | "fma");
    if float && (of.size() == 2 || directed && !exact) {
        return Ok(None);
    }
    let carry = form.has("cc");
    let mode = form.mode();
    if mode.sat && !float && of != Type::S(4) {
        return Ok(None);
    }
    let d = |low: &mut Lowering<'_>| low.register(form.operand(0));
    if let "addc" | "subc" | "madc" = name {
        return carried(low, form, of, true, carry);
    }
    if carry {
        return carried(low, form, of, false, true);
    }
    if let Some(op) = unary(name, form, float) {
        return Ok(Some(Op::Unary {
            op,
            of,
            mode,
            d: d(low)?,
            a: low.source(form.operand(1))?,
        }));
    }
    if let Some(op) = binary(name, form, float) {
        let (d, a) = (d(low)?, low.source(form.operand(1))?);
        return Ok(Some(Op::Binary {
            op,
            of,
            mode,
            d,
            a,
            b: low.source(form.operand(2))?,
        }));
    }
    let Some(op) = ternary(name, form, float) else {
        return Ok(None);
    };
    let op = match op {
        Ternary::Lop3(_) => match form.operand(4) {
            Operand::Bits(table) => Ternary::Lop3(u8::try_from(table & 0xff).unwrap_or(0)),
            _ => return Ok(None),
        },
        Ternary::Prmt if form.parts.len() > 2 => return Ok(None),
        other => other,
    };
    // The first type of dp4a is that of its first operand.
    let of = if name == "dp4a" {
        form.types().first().copied().unwrap_or(of)
    } else {
        of
    };
    let d = d(low)?;
    let (a, b) = (low.source(form.operand(1))?, low.source(form.operand(2))?);
    Ok(Some(Op::Ternary {
        op,
        of,
        mode,
        d,
        a,
        b,
        c: low.source(form.operand(3))?,
    }))
}

fn unary(name: &str, form: &Form<'_>, float: bool) -> Option<Unary> {
    Some(match name {
        "neg" => Unary::Neg,
        "abs" => Unary::Abs,
        "not" => Unary::Not,
        "cnot" => Unary::Cnot,
        "popc" => Unary::Popc,
        "clz" => Unary::Clz,
        "brev" => Unary::Brev,
        "bfind" if form.has("shiftamt") => Unary::BfindShift,
        "bfind" => Unary::Bfind,
        "sqrt" if float => Unary::Sqrt,
        "rsqrt" if float => Unary::Rsqrt,
        "rcp" if float => Unary::Rcp,
        "sin" => Unary::Sin,
        "cos" => Unary::Cos,
        "ex2" => Unary::Ex2,
        "lg2" => Unary::Lg2,
        "tanh" => Unary::Tanh,
        _ => return None,
    })
}

fn binary(name: &str, form: &Form<'_>, float: bool) -> Option<Binary> {
    let nan = float && form.has("NaN");
    if form.has("xorsign") || form.has("abs") {
        return None;
    }
    Some(match name {
        "add" => Binary::Add,
        "sub" => Binary::Sub,
        "mul" if float => Binary::MulLo,
        "mul" if form.has("lo") => Binary::MulLo,
        "mul" if form.has("hi") => Binary::MulHi,
        "mul" if form.has("wide") => Binary::MulWide,
        "div" => Binary::Div,
        "rem" => Binary::Rem,
        "min" if nan => Binary::MinNan,
        "max" if nan => Binary::MaxNan,
        "min" => Binary::Min,
        "max" => Binary::Max,
        "and" => Binary::And,
        "or" => Binary::Or,
        "xor" => Binary::Xor,
        "shl" => Binary::Shl,
        "shr" => Binary::Shr,
        "copysign" => Binary::CopySign,
        _ => return None,
    })
}

fn ternary(name: &str, form: &Form<'_>, float: bool) -> Option<Ternary> {
    Some(match name {
        "mad" | "fma" if float => Ternary::Fma,
        "mad" if form.has("lo") => Ternary::MadLo,
        "mad" if form.has("hi") => Ternary::MadHi,
        "mad" if form.has("wide") => Ternary::MadWide,
        "bfe" => Ternary::Bfe,
        "prmt" => Ternary::Prmt,
        "lop3" => Ternary::Lop3(0),
        "shf" if form.has("l") => Ternary::ShiftLeft {
            wrap: form.has("wrap"),
        },
        "shf" if form.has("r") => Ternary::ShiftRight {
            wrap: form.has("wrap"),
        },
        "sad" => Ternary::Sad,
        "dp4a" => Ternary::Dp4a {
            unsigned_b: form.types().last() == Some(&Type::U(4)),
        },
        _ => return None,
    })
}

fn carried(
    low: &mut Lowering<'_>,
    form: &Form<'_>,
    of: Type,
    takes: bool,
    gives: bool,
) -> Result<Option<Op>, Error> {
    let name = form.parts.first().map_or("", String::as_str);
    let d = low.register(form.operand(0))?;
    let (a, b) = (low.source(form.operand(1))?, low.source(form.operand(2))?);
    Ok(Some(match name {
        "add" | "addc" => Op::Carry {
            subtract: false,
            takes,
            gives,
            of,
            d,
            a,
            b,
        },
        "sub" | "subc" => Op::Carry {
            subtract: true,
            takes,
            gives,
            of,
            d,
            a,
            b,
        },
        "mad" | "madc" => {
            let c = low.source(form.operand(3))?;
            Op::MadCarry {
                high: form.has("hi"),
                takes,
                gives,
                of,
                d,
                a,
                b,
                c,
            }
        }
        _ => return Ok(None),
    }))
}

fn mov(low: &mut Lowering<'_>, form: &Form<'_>, of: Option<Type>) -> Result<Option<Op>, Error> {
    let Some(of) = of else { return Ok(None) };
    let size = of.size();
    Ok(Some(match (form.operand(0), form.operand(1)) {
        (Operand::Vector(parts), a) => {
            let parts: Result<Vec<_>, _> = parts
                .iter()
                .map(|part| low.register_or_none(part))
                .collect();
            let parts = parts?;
            if !matches!(parts.len(), 2 | 4 | 8) || parts.len() > usize::from(size) {
                return Ok(None);
            }
            Op::Unpack {
                a: low.source(a)?,
                parts,
                size,
            }
        }
        (d, Operand::Vector(parts)) => {
            let parts: Result<Vec<_>, _> = parts.iter().map(|part| low.source(part)).collect();
            let parts = parts?;
            if !matches!(parts.len(), 2 | 4 | 8) || parts.len() > usize::from(size) {
                return Ok(None);
            }
            Op::Pack {
                d: low.register(d)?,
                parts,
                size,
            }
        }
        // The address of a kernel's parameter is that in its space.
        (d, a) => Op::Move {
            d: low.register(d)?,
            a: low.source(a)?,
            size,
        },
    }))
}

fn lanes(form: &Form<'_>) -> usize {
    match (form.has("v2"), form.has("v4"), form.has("v8")) {
        (true, ..) => 2,
        (_, true, _) => 4,
        (_, _, true) => 8,
        _ => 1,
    }
}

fn load(low: &mut Lowering<'_>, form: &Form<'_>, of: Option<Type>) -> Result<Option<Op>, Error> {
    let Some(of) = of else { return Ok(None) };
    let to = match form.operand(0) {
        Operand::Vector(parts) => parts
            .iter()
            .map(|part| low.register_or_none(part))
            .collect::<Result<Vec<_>, _>>()?,
        one => vec![Some(low.register(one)?)],
    };
    if to.len() != lanes(form) || of == Type::Pred {
        return Ok(None);
    }
    Ok(Some(Op::Load {
        of,
        to,
        at: low.address(form.operand(1), form.space())?,
    }))
}

fn store(low: &mut Lowering<'_>, form: &Form<'_>, of: Option<Type>) -> Result<Option<Op>, Error> {
    let Some(of) = of else { return Ok(None) };
    let from = match form.operand(1) {
        Operand::Vector(parts) => parts
            .iter()
            .map(|part| low.source(part))
            .collect::<Result<Vec<_>, _>>()?,
        one => vec![low.source(one)?],
    };
    if from.len() != lanes(form) || of == Type::Pred {
        return Ok(None);
    }
    Ok(Some(Op::Store {
        of,
        from,
        at: low.address(form.operand(0), form.space())?,
    }))
}

fn cvta(low: &mut Lowering<'_>, form: &Form<'_>) -> Result<Option<Op>, Error> {
    let (d, a) = (low.register(form.operand(0))?, low.source(form.operand(1))?);
    let space = form.space();
    Ok(Some(if form.has("to") {
        Op::FromGeneric { space, d, a }
    } else {
        Op::ToGeneric { space, d, a }
    }))
}

fn compare(form: &Form<'_>, of: Type) -> Option<Compare> {
    let float = matches!(of, Type::F(_));
    form.parts.iter().skip(1).find_map(|part| {
        let relation = |name: &str| {
            Some(match name {
                "eq" => Relation::Eq,
                "ne" => Relation::Ne,
                "lt" | "lo" => Relation::Lt,
                "le" | "ls" => Relation::Le,
                "gt" | "hi" => Relation::Gt,
                "ge" | "hs" => Relation::Ge,
                _ => return None,
            })
        };
        match part.as_str() {
            "num" => Some(Compare::Numbers),
            "nan" => Some(Compare::NotNumbers),
            name if float && name.ends_with('u') => name
                .strip_suffix('u')
                .and_then(relation)
                .map(Compare::Unordered),
            name => relation(name).map(Compare::Ordered),
        }
    })
}

fn logic(form: &Form<'_>) -> Option<Logic> {
    form.parts
        .iter()
        .skip(1)
        .find_map(|part| match part.as_str() {
            "and" => Some(Logic::And),
            "or" => Some(Logic::Or),
            "xor" => Some(Logic::Xor),
            _ => None,
        })
}

fn with(low: &mut Lowering<'_>, form: &Form<'_>) -> Result<Option<(Logic, Src, bool)>, Error> {
    let Some(logic) = logic(form) else {
        return Ok(None);
    };
    let (p, negated) = low.predicate(form.operand(3))?;
    Ok(Some((logic, p, negated)))
}

fn setp(low: &mut Lowering<'_>, form: &Form<'_>, of: Option<Type>) -> Result<Option<Op>, Error> {
    let Some(of) = of.filter(|of| *of != Type::F(2)) else {
        return Ok(None);
    };
    let Some(how) = compare(form, of) else {
        return Ok(None);
    };
    let (p, q) = match form.operand(0) {
        Operand::Pair(p, q) => (low.register(p)?, low.register_or_none(q)?),
        p => (low.register(p)?, None),
    };
    let (a, b) = (low.source(form.operand(1))?, low.source(form.operand(2))?);
    let with = with(low, form)?;
    Ok(Some(Op::SetPredicate {
        how,
        of,
        ftz: form.has("ftz"),
        with,
        p,
        q,
        a,
        b,
    }))
}

fn set(low: &mut Lowering<'_>, form: &Form<'_>, types: &[Type]) -> Result<Option<Op>, Error> {
    let [to, of] = *types else { return Ok(None) };
    if of == Type::F(2) || to == Type::F(2) {
        return Ok(None);
    }
    let Some(how) = compare(form, of) else {
        return Ok(None);
    };
    let d = low.register(form.operand(0))?;
    let (a, b) = (low.source(form.operand(1))?, low.source(form.operand(2))?);
    let with = with(low, form)?;
    Ok(Some(Op::Set {
        how,
        to,
        of,
        ftz: form.has("ftz"),
        with,
        d,
        a,
        b,
    }))
}

fn cvt(low: &mut Lowering<'_>, form: &Form<'_>, types: &[Type]) -> Result<Option<Op>, Error> {
    let [to, from] = *types else { return Ok(None) };
    let known = [
        "cvt", "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat",
    ];
    let others = |part: &String| !known.contains(&part.as_str()) && Type::named(part).is_none();
    if form.parts.iter().any(others) {
        return Ok(None);
    }
    let round = form.round();
    let to_integer = ["rni", "rzi", "rmi", "rpi"]
        .iter()
        .any(|part| form.has(part));
    // Directed rounding is supported only from double to single.
    let directed = !matches!(round, None | Some(Round::Nearest));
    if matches!(to, Type::F(_)) && !to_integer && directed && (to, from) != (Type::F(4), Type::F(8))
    {
        return Ok(None);
    }
    let (d, a) = (low.register(form.operand(0))?, low.source(form.operand(1))?);
    Ok(Some(Op::Convert {
        to,
        from,
        round,
        to_integer,
        mode: form.mode(),
        d,
        a,
    }))
}

fn barrier(low: &mut Lowering<'_>, form: &Form<'_>) -> Result<Option<Op>, Error> {
    if form.has("warp") {
        return Ok(Some(Op::Together {
            what: Together::Barrier,
            mask: low.source(form.operand(0))?,
        }));
    }
    if form.has("cluster") {
        return Ok(None);
    }
    let (mut at, mut result) = (0, None);
    if form.has("red") {
        let d = low.register(form.operand(0))?;
        result = Some(match logic(form) {
            Some(Logic::And) => BarrierResult::And(d),
            Some(Logic::Or) => BarrierResult::Or(d),
            _ if form.has("popc") => BarrierResult::Count(d),
            _ => return Ok(None),
        });
        at = 1;
    }
    let id = low.source(form.operand(at))?;
    let last = form.operands.len() - usize::from(result.is_some());
    let threads = if at + 1 < last {
        Some(low.source(form.operand(at + 1))?)
    } else {
        None
    };
    let result = match result {
        Some(result) => {
            let (p, negated) = low.predicate(form.operand(last))?;
            Some((result, p, negated))
        }
        None => None,
    };
    Ok(Some(Op::Barrier {
        id,
        threads,
        arrive: form.has("arrive"),
        result,
    }))
}

fn pair(low: &mut Lowering<'_>, operand: &Operand) -> Result<(Reg, Option<Reg>), Error> {
    Ok(match operand {
        Operand::Pair(d, p) => (low.register(d)?, low.register_or_none(p)?),
        d => (low.register(d)?, None),
    })
}

fn together(
    low: &mut Lowering<'_>,
    form: &Form<'_>,
    of: Option<Type>,
) -> Result<Option<Op>, Error> {
    let name = form.parts.first().map_or("", String::as_str);
    if name == "activemask" {
        return Ok(Some(Op::ActiveMask(low.register(form.operand(0))?)));
    }
    // Since Volta these require a mask.
    let Some(of) = of.filter(|_| form.has("sync")) else {
        return Ok(None);
    };
    let (what, mask) = match name {
        "shfl" => {
            let how = match form.parts.get(2).map(String::as_str) {
                Some("up") => Shuffle::Up,
                Some("down") => Shuffle::Down,
                Some("bfly") => Shuffle::Butterfly,
                Some("idx") => Shuffle::Index,
                _ => return Ok(None),
            };
            let (d, p) = pair(low, form.operand(0))?;
            let (a, b) = (low.source(form.operand(1))?, low.source(form.operand(2))?);
            let c = low.source(form.operand(3))?;
            (Together::Shuffle { how, d, p, a, b, c }, 4)
        }
        "vote" => {
            let how = match form.parts.get(2).map(String::as_str) {
                Some("all") => Vote::All,
                Some("any") => Vote::Any,
                Some("uni") => Vote::Uniform,
                Some("ballot") => Vote::Ballot,
                _ => return Ok(None),
            };
            let d = low.register(form.operand(0))?;
            let (p, negated) = low.predicate(form.operand(1))?;
            (Together::Vote { how, d, p, negated }, 2)
        }
        "match" => {
            let (d, p) = pair(low, form.operand(0))?;
            let a = low.source(form.operand(1))?;
            (
                Together::Match {
                    all: form.has("all"),
                    size: of.size(),
                    d,
                    p,
                    a,
                },
                2,
            )
        }
        "redux" => {
            let how = match form.parts.get(2).and_then(|part| atomic_op(part)) {
                Some(how) if !matches!(of, Type::F(_)) => how,
                _ => return Ok(None),
            };
            let d = low.register(form.operand(0))?;
            (
                Together::Reduce {
                    how,
                    of,
                    d,
                    a: low.source(form.operand(1))?,
                },
                2,
            )
        }
        _ => return Ok(None),
    };
    Ok(Some(Op::Together {
        what,
        mask: low.source(form.operand(mask))?,
    }))
}

fn atomic_op(name: &str) -> Option<Atomic> {
    Some(match name {
        "add" => Atomic::Add,
        "and" => Atomic::And,
        "or" => Atomic::Or,
        "xor" => Atomic::Xor,
        "min" => Atomic::Min,
        "max" => Atomic::Max,
        "inc" => Atomic::Inc,
        "dec" => Atomic::Dec,
        "exch" => Atomic::Exchange,
        "cas" => Atomic::CompareAndSwap,
        _ => return None,
    })
}

fn atomic(low: &mut Lowering<'_>, form: &Form<'_>, of: Option<Type>) -> Result<Option<Op>, Error> {
    let op = form.parts.iter().skip(1).find_map(|part| atomic_op(part));
    let (Some(of), Some(op)) = (of, op) else {
        return Ok(None);
    };
    if of.size() < 4 || lanes(form) > 1 {
        return Ok(None);
    }
    let float = matches!(of, Type::F(_));
    if float && op != Atomic::Add {
        return Ok(None);
    }
    let returns = form.parts.first().is_some_and(|name| name == "atom");
    let d = if returns {
        low.register_or_none(form.operand(0))?
    } else {
        None
    };
    let at = usize::from(returns);
    let address = low.address(form.operand(at), form.space())?;
    let b = low.source(form.operand(at + 1))?;
    let c = match op {
        Atomic::CompareAndSwap => low.source(form.operand(at + 2))?,
        _ => Src::Value(0),
    };
    Ok(Some(Op::Atomic {
        op,
        of,
        d,
        at: address,
        b,
        c,
    }))
}

/// Asynchronous copies are done at once, so waiting for them finds them done.
fn copy(low: &mut Lowering<'_>, form: &Form<'_>) -> Result<Option<Op>, Error> {
    if !form.has("async") || form.has("bulk") || form.has("mbarrier") {
        return Ok(None);
    }
    if form.has("commit_group") || form.has("wait_group") || form.has("wait_all") {
        return Ok(Some(Op::Nothing));
    }
    let Operand::Bits(size) = *form.operand(2) else {
        return Ok(None);
    };
    if !matches!(size, 4 | 8 | 16) {
        return Ok(None);
    }
    let to = low.address(form.operand(0), Space::Shared)?;
    let from = low.address(form.operand(1), Space::Global)?;
    let filled = match form.operands.get(3) {
        Some(filled) => Some(low.source(filled)?),
        None => None,
    };
    Ok(Some(Op::Copy {
        to,
        from,
        size,
        filled,
    }))
}

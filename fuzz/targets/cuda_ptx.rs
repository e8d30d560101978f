//! PTX that a program passes to the stand-in driver: raw text, and PTX keywords in any order.

#![no_main]

use gantry_fuzz::input::Input;
use libfuzzer_sys::fuzz_target;

const WORDS: &[&str] = &[
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "<",
    ">",
    ",",
    ";",
    ":",
    "+",
    "-",
    "!",
    "@",
    "|",
    "=",
    "\n",
    "_",
    "0",
    "1",
    "2",
    "16",
    "64",
    "0x7fffffff",
    "-1",
    "18446744073709551615",
    "0f3F800000",
    "0d3FF0000000000000",
    ".visible",
    ".extern",
    ".entry k",
    ".func f",
    ".func (.param .b32 r) g",
    ".param",
    ".reg",
    ".local",
    ".shared",
    ".global",
    ".const",
    ".align 8",
    ".b8",
    ".b32",
    ".b64",
    ".u32",
    ".s64",
    ".f32",
    ".f64",
    ".pred",
    ".v2",
    ".v4",
    "%r",
    "%p",
    "%r1",
    "%r<4>",
    "%p1",
    "%tid.x",
    "a",
    "b",
    "L",
    "L:",
    "T: .branchtargets L;",
    "generic(a)",
    "mov",
    "ld",
    "st",
    "add",
    "mad",
    "fma",
    "mul.lo",
    "mul.wide",
    "shl",
    "shf.l.wrap",
    "lop3",
    "prmt",
    "bfi",
    "setp.eq.and",
    "selp",
    "cvt.rni",
    "cvta.to.global",
    "bra",
    "brx.idx",
    "call",
    "call.uni (r), g, (a)",
    "vprintf",
    "ret",
    "exit",
    "bar.sync",
    "bar.red.popc",
    "atom.global.add",
    "red.shared.max",
    "shfl.sync.up",
    "vote.sync.ballot",
    "match.any.sync",
    "redux.sync.add",
    "cp.async.ca.shared.global",
    ".loc 1 1 1\n",
    ".maxntid 1, 1, 1",
    "/*",
    "*/",
    "//",
    "\"",
];

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = gantry_cuda_driver::check(text);
    }
    let mut input = Input::new(bytes);
    // Every other input is the body of a kernel, together with what its words may refer to.
    let inside = input.u8().is_multiple_of(2);
    let mut text = String::from(".version 9.0\n.target sm_75\n.address_size 64\n");
    if inside {
        text += ".global .b32 a;\n.extern .shared .b8 b[];\n\
            .func (.param .b32 r) g(.param .b32 q) { ret; }\n\
            .visible .entry k(.param .b64 c) {\n.reg .b64 %r<4>;\n.reg .pred %p<2>;\n.param .b32 r;\nL:\n";
    }
    for _ in 0..bytes.len() {
        text += WORDS[usize::from(input.u8()) % WORDS.len()];
        text.push(' ');
    }
    if inside {
        text += "; }";
    }
    let _ = gantry_cuda_driver::check(&text);
});

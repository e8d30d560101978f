//! Programs compiled by NVRTC, compared with the same on the CPU.

use cuda_definition::driver::types::*;

use crate::driver::{argument, context, device, function, module, ok, run, values};

macro_rules! kernels {
    ($name:literal) => {
        [
            include_str!(concat!("../kernels/", $name, ".compute_75.ptx")),
            include_str!(concat!("../kernels/", $name, ".compute_80.ptx")),
        ]
    };
}

/// Numbers that are the same in each run.
fn random() -> impl FnMut() -> u32 {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    }
}

fn floats(count: usize) -> Vec<f32> {
    let mut random = random();
    (0..count)
        .map(|_| (random() % 2000) as f32 / 100.0 - 10.0)
        .collect()
}

#[test]
fn vectors_are_added() {
    let _context = context();
    for ptx in kernels!("vector_add") {
        let add = function(module(ptx), "vector_add");
        let (a, b) = (floats(1000), floats(2000));
        let (on_a, on_b) = (device(&a), device(&b[1000..]));
        let out = device(&[0f32; 1000]);
        let count = 1000i32;
        run(
            add,
            [4, 1, 1],
            [256, 1, 1],
            0,
            &[
                argument(&on_a),
                argument(&on_b),
                argument(&out),
                argument(&count),
            ],
        );
        let expected: Vec<f32> = a.iter().zip(&b[1000..]).map(|(a, b)| a + b).collect();
        assert_eq!(values::<f32>(out, 1000), expected);
    }
}

#[test]
fn matrices_are_multiplied_by_tiles() {
    let _context = context();
    // Not a multiple of the tile.
    let size = 37usize;
    let all = floats(2 * size * size);
    let (a, b) = all.split_at(size * size);
    let mut expected = vec![0f32; size * size];
    for row in 0..size {
        for column in 0..size {
            let sum = &mut expected[row * size + column];
            for i in 0..size {
                // The compiler fuses as this does.
                *sum = a[row * size + i].mul_add(b[i * size + column], *sum);
            }
        }
    }
    for ptx in kernels!("matmul") {
        let matmul = function(module(ptx), "matmul");
        let (on_a, on_b) = (device(a), device(b));
        let out = device(&vec![0f32; size * size]);
        let count = size as i32;
        run(
            matmul,
            [3, 3, 1],
            [16, 16, 1],
            0,
            &[
                argument(&on_a),
                argument(&on_b),
                argument(&out),
                argument(&count),
            ],
        );
        assert_eq!(values::<f32>(out, size * size), expected);
    }
}

#[test]
fn integers_are_summed_by_shuffles() {
    let _context = context();
    let mut random = random();
    let numbers: Vec<i32> = (0..5000).map(|_| (random() % 100_000) as i32).collect();
    let expected: u64 = numbers.iter().map(|number| *number as u64).sum();
    for ptx in kernels!("reduce") {
        let reduce = function(module(ptx), "reduce");
        // 96 threads: not all lanes of the second step have a warp.
        for threads in [96, 256] {
            let (on, total) = (device(&numbers), device(&[0u64]));
            let count = numbers.len() as i32;
            run(
                reduce,
                [5, 1, 1],
                [threads, 1, 1],
                0,
                &[argument(&on), argument(&count), argument(&total)],
            );
            assert_eq!(values::<u64>(total, 1), [expected]);
        }
    }
}

#[test]
fn bytes_are_counted_in_dynamic_shared_memory() {
    let _context = context();
    let mut random = random();
    let bytes: Vec<u8> = (0..10_000)
        .map(|_| (random() % 256 * (random() % 256) / 256) as u8)
        .collect();
    let mut expected = vec![0u32; 256];
    bytes
        .iter()
        .for_each(|byte| expected[usize::from(*byte)] += 1);
    for ptx in kernels!("histogram") {
        let histogram = function(module(ptx), "histogram");
        let (on, bins) = (device(&bytes), device(&[0u32; 256]));
        let count = bytes.len() as u32;
        run(
            histogram,
            [7, 1, 1],
            [128, 1, 1],
            1024,
            &[argument(&on), argument(&count), argument(&bins)],
        );
        assert_eq!(values::<u32>(bins, 256), expected);
    }
}

#[test]
fn rows_have_their_softmax() {
    let _context = context();
    let (rows, columns) = (5usize, 300usize);
    let all = floats(rows * columns);
    for ptx in kernels!("softmax") {
        let softmax = function(module(ptx), "softmax");
        let (on, out) = (device(&all), device(&vec![0f32; rows * columns]));
        let count = columns as i32;
        run(
            softmax,
            [rows as u32, 1, 1],
            [128, 1, 1],
            0,
            &[argument(&on), argument(&out), argument(&count)],
        );
        let found = values::<f32>(out, rows * columns);
        for (row, found) in all.chunks(columns).zip(found.chunks(columns)) {
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row
                .iter()
                .map(|value| f64::from(value - largest).exp())
                .sum();
            for (value, found) in row.iter().zip(found) {
                let expected = f64::from(value - largest).exp() / sum;
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error <= 2e-6 * expected + 1e-12,
                    "{found} is not {expected}"
                );
            }
        }
    }
}

#[repr(C)]
struct Parameters {
    factor: i64,
    steps: [i16; 3],
    flag: u8,
}

fn collatz(mut n: u64) -> i64 {
    let mut steps = 0;
    while n != 1 {
        n = if n % 2 == 1 { 3 * n + 1 } else { n / 2 };
        steps += 1;
    }
    steps
}

fn power(mut base: f64, mut exponent: i32) -> f64 {
    let mut result = 1.0;
    while exponent != 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        exponent >>= 1;
        base *= base;
    }
    result
}

/// The same as mixed.cu, for one lane.
fn mixed(lane: i32, p: &Parameters) -> i64 {
    const WEIGHTS: [i32; 4] = [3, 5, 7, 11];
    let local = |i: i32| i * lane + WEIGHTS[(i % 4) as usize];
    let mut value = collatz(lane as u64 + 1) + i64::from(local((lane * 7) % 16));
    match lane % 7 {
        0 => value += p.factor,
        1 => value -= i64::from(p.steps[0]),
        2 => value *= i64::from(p.steps[1]),
        3 => value /= i64::from(p.steps[2]),
        4 => value <<= 3,
        5 => value = -value >> 1,
        _ => value ^= 0x5555,
    }
    value += i64::from(0xaaaa_aaaa_u32.count_ones()) + 100 + 1000 + i64::from(p.flag);
    let next = lane + 1;
    value += i64::from(next.leading_zeros()) + i64::from(next.trailing_zeros() + 1);
    value += i64::from((lane as u32).reverse_bits()) % 97;
    // __byte_perm with 0x3210 is the first operand.
    value += i64::from(lane as u32 % 13);
    let product = u64::from((lane as u32).wrapping_mul(0x0123_4567)) * 0x89ab_cdef;
    // The product is of the value as it was before this statement.
    let high = ((i128::from(value) * 0x0123_4567_89ab_cdef) >> 64) as i64;
    value
        + i64::from((product >> 32) as u32)
        + high
        + i64::from(lane.min(9))
        + i64::from((lane - 16).abs())
}

#[test]
fn other_instructions_compute_what_the_cpu_does() {
    let _context = context();
    let p = Parameters {
        factor: -123_456_789_012,
        steps: [-7, 300, -3],
        flag: 200,
    };
    for ptx in kernels!("mixed") {
        let module = module(ptx);
        let (out, real) = (device(&[0i64; 32]), device(&[0f64; 32]));
        run(
            function(module, "mixed"),
            [1, 1, 1],
            [32, 1, 1],
            0,
            &[argument(&p), argument(&out), argument(&real)],
        );
        let expected: Vec<i64> = (0..32).map(|lane| mixed(lane, &p)).collect();
        assert_eq!(values::<i64>(out, 32), expected);
        for (lane, found) in (0..32i32).zip(values::<f64>(real, 32)) {
            let x = f64::from(lane);
            let table = [1.5, 2.5][..]
                .get(lane as usize % 8)
                .copied()
                .unwrap_or(0.0);
            let expected = power(1.0 + x / 32.0, lane)
                + x.sqrt()
                + 0.5f64.mul_add(x, 0.25)
                + (x * 0.3).floor()
                + table
                + 1.0 / (x + 1.0).sqrt()
                + f64::from((x as f32 * 1.7).trunc())
                + f64::from((lane ^ 3) * 2)
                + x
                + (x * 0.1).sin()
                + (x + 1.0).ln();
            assert!(
                (found - expected).abs() < 1e-5 * expected.abs().max(1.0),
                "lane {lane}: {found}, not {expected}"
            );
        }
        let mut counter = (0, 0);
        ok!(cuModuleGetGlobal_v2(
            &mut counter.0,
            &mut counter.1,
            module,
            c"counter".as_ptr()
        ));
        assert_eq!(counter.1, 4);
        assert_eq!(values::<u32>(counter.0, 1), [(0..32).sum::<u32>()]);
        let mut table = (0, 0);
        ok!(cuModuleGetGlobal_v2(
            &mut table.0,
            &mut table.1,
            module,
            c"table".as_ptr()
        ));
        let table = values::<f32>(table.0, 8);
        assert_eq!(table[5], 16.0);
        assert_eq!(table[6], 4.5);
        assert_eq!(table[7].to_bits(), 31);
    }
}

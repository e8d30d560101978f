//! Matrix products.

use cuda_definition::driver::types::CUstream;

use crate::{
    INVALID_VALUE, NOT_SUPPORTED, Outcome,
    numbers::{Matrix, Scalar, Type, check},
    stream,
};

/// What follows a product, by the bits of `cublasLtEpilogue_t`.
#[derive(Clone, Copy, Debug, Default)]
pub struct After {
    /// A number per row that is added.
    pub bias: Option<(Type, u64)>,
    pub relu: bool,
    pub gelu: bool,
}

/// D = alpha op(A) op(B) + beta C, for each element of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub transposed: (bool, bool),
    /// Rows and columns of D, and the length of the sums.
    pub shape: (i64, i64, i64),
    pub alpha: Scalar,
    pub beta: Scalar,
    pub a: Matrix,
    pub b: Matrix,
    pub c: Matrix,
    pub d: Matrix,
    pub batch: i64,
    pub after: After,
}

/// Whether a `cublasOperation_t` of real numbers transposes.
pub fn is_transposed(operation: u32) -> Outcome<bool> {
    match operation {
        0 => Ok(false),
        1 | 2 => Ok(true),
        _ => Err(INVALID_VALUE),
    }
}

impl Product {
    /// Queues the computation in stream order.
    pub fn submit(self, stream: CUstream) -> Outcome {
        let (m, n, k) = self.shape;
        let rows = |transposed: bool, rows: i64, columns: i64| {
            if transposed {
                (columns, rows)
            } else {
                (rows, columns)
            }
        };
        let (a_rows, a_columns) = rows(self.transposed.0, m, k);
        let (b_rows, b_columns) = rows(self.transposed.1, k, n);
        self.a.check(a_rows, a_columns, self.batch)?;
        self.b.check(b_rows, b_columns, self.batch)?;
        self.c.check(m, n, self.batch)?;
        self.d.check(m, n, self.batch)?;
        if let Some((of, at)) = self.after.bias {
            check(at, of.size() * m.unsigned_abs())?;
        }
        if m.checked_mul(n)
            .and_then(|size| size.checked_mul(k.max(1))?.checked_mul(self.batch.max(1)))
            .is_none_or(|work| work > 1 << 34)
        {
            // Too slow on a CPU for anyone to wait for it.
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: checked above; programs do not free memory that is in use.
        stream::submit(stream, move || unsafe { self.run() })
    }

    /// # Safety
    /// All matrices exist.
    unsafe fn run(&self) {
        let (m, n, k) = self.shape;
        // SAFETY: the caller's promise.
        unsafe {
            let (alpha, beta) = (self.alpha.value(), self.beta.value());
            let double = self.d.of == Type::Double;
            for batch in 0..self.batch {
                for column in 0..n {
                    for row in 0..m {
                        let mut sum = 0f64;
                        for inner in 0..k {
                            let (i, j) = if self.transposed.0 {
                                (inner, row)
                            } else {
                                (row, inner)
                            };
                            let a = self.a.of.load(self.a.place(i, j, batch));
                            let (i, j) = if self.transposed.1 {
                                (column, inner)
                            } else {
                                (inner, column)
                            };
                            sum += a * self.b.of.load(self.b.place(i, j, batch));
                            if !double {
                                sum = f64::from(sum as f32);
                            }
                        }
                        let mut value = alpha * sum;
                        if beta != 0.0 {
                            value += beta * self.c.of.load(self.c.place(row, column, batch));
                        }
                        if let Some((of, at)) = self.after.bias {
                            value += of.load(at + row.unsigned_abs() * of.size());
                        }
                        if self.after.relu {
                            value = value.max(0.0);
                        }
                        if self.after.gelu {
                            let inner =
                                0.797_884_560_802_865_4 * (value + 0.044_715 * value.powi(3));
                            value = 0.5 * value * (1.0 + inner.tanh());
                        }
                        self.d.of.store(self.d.place(row, column, batch), value);
                    }
                }
            }
        }
    }
}

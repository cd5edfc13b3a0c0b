//! The operators `+ − · /` and unary `−`, for values that op calls can be applied to.
//!
//! An operation can fail, so an operator returns a [`Result`](crate::Result). The right operand may itself be such a
//! result, so `(&a + &b * &c)?` needs one question mark. A result on the left must be unwrapped first:
//! `((&a * &b)? + &c)?`.

use crate::Tensor;

/// Implements the operators for `$value<R>`, owned and by reference. On the right is a value, a result or an `f64`, on
/// the left an `f64` too.
#[doc(hidden)]
#[macro_export]
macro_rules! operators {
    ($value:ident) => {
        $crate::operators!(@all $value Add add add, Sub sub rsub, Mul mul mul, Div div rdiv);

        impl<R: $crate::Runtime> std::ops::Neg for &$value<R> {
            type Output = $crate::Result<$value<R>>;
            #[track_caller]
            fn neg(self) -> Self::Output {
                $crate::ops::PointwiseOps::neg(self)
            }
        }

        impl<R: $crate::Runtime> std::ops::Neg for $value<R> {
            type Output = $crate::Result<$value<R>>;
            #[track_caller]
            fn neg(self) -> Self::Output {
                $crate::ops::PointwiseOps::neg(&self)
            }
        }
    };
    (@all $value:ident $($operator:ident $method:ident $reversed:ident),*) => {$(
        $crate::operators!(@left $value $operator $method, &$value<R>);
        $crate::operators!(@left $value $operator $method, $value<R>);

        impl<R: $crate::Runtime> std::ops::$operator<&$value<R>> for f64 {
            type Output = $crate::Result<$value<R>>;
            #[track_caller]
            fn $method(self, right: &$value<R>) -> Self::Output {
                $crate::ops::PointwiseOps::$reversed(right, self)
            }
        }

        impl<R: $crate::Runtime> std::ops::$operator<$value<R>> for f64 {
            type Output = $crate::Result<$value<R>>;
            #[track_caller]
            fn $method(self, right: $value<R>) -> Self::Output {
                std::ops::$operator::$method(self, &right)
            }
        }
    )*};
    (@left $value:ident $operator:ident $method:ident, $left:ty) => {
        impl<R: $crate::Runtime> std::ops::$operator<&$value<R>> for $left {
            type Output = $crate::Result<$value<R>>;
            #[track_caller]
            fn $method(self, right: &$value<R>) -> Self::Output {
                $crate::ops::PointwiseOps::$method(std::borrow::Borrow::<$value<R>>::borrow(&self), right)
            }
        }

        impl<R: $crate::Runtime> std::ops::$operator<$value<R>> for $left {
            type Output = $crate::Result<$value<R>>;
            #[track_caller]
            fn $method(self, right: $value<R>) -> Self::Output {
                std::ops::$operator::$method(self, &right)
            }
        }

        impl<R: $crate::Runtime> std::ops::$operator<$crate::Result<$value<R>>> for $left {
            type Output = $crate::Result<$value<R>>;
            #[track_caller]
            fn $method(self, right: $crate::Result<$value<R>>) -> Self::Output {
                std::ops::$operator::$method(self, &right?)
            }
        }

        impl<R: $crate::Runtime> std::ops::$operator<f64> for $left {
            type Output = $crate::Result<$value<R>>;
            #[track_caller]
            fn $method(self, right: f64) -> Self::Output {
                $crate::ops::PointwiseOps::$method(std::borrow::Borrow::<$value<R>>::borrow(&self), right)
            }
        }
    };
}

operators!(Tensor);

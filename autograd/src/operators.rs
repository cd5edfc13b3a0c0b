//! The operators `+ − · /` for variables: `(&a + &b)?`.

use crate::Var;

numcore::operators!(Var);

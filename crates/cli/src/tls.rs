//! Flags about who may listen, and who is believed.

use std::env;
use std::path::{Path, PathBuf};

use fanin_controller::{Acceptor, Identity, Secret, Trust};

use crate::output;

/// The file of a switch's key, in the folder of what it keeps.
const KEY: &str = "tls-key.pem";

/// By what a command knows the switches that it asks.
#[derive(Debug, clap::Args)]
pub(crate) struct Known {
    /// Certificates in PEM of those who vouch for switches, where there are some
    #[arg(long, value_name = "FILE", env = "FANIN_TLS_CA")]
    pub tls_ca: Option<PathBuf>,
    /// A secret that all ranks, switches and commands of a cluster have, and nobody else
    /// (docs/security.md)
    #[arg(long, value_name = "FILE", env = "FANIN_SECRET_FILE", hide_env_values = true)]
    pub secret_file: Option<PathBuf>,
}

impl Known {
    pub fn trust(&self) -> anyhow::Result<Trust> {
        Ok(Trust::read(self.tls_ca.as_deref(), self.secret_file.as_deref())?)
    }
}

/// By what a switch is known.
#[derive(Debug, clap::Args)]
pub(crate) struct Own {
    /// The switch's certificate in PEM, with those that lead from it to --tls-ca
    #[arg(long, value_name = "FILE", env = "FANIN_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key in PEM; without --tls-cert it is made where there is none [default: tls-key.pem of
    /// $STATE_DIRECTORY, or of fanin in $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, value_name = "FILE", env = "FANIN_TLS_KEY")]
    tls_key: Option<PathBuf>,
}

impl Own {
    /// Takes those who are known as the command knows switches.
    pub fn acceptor(&self, known: &Known) -> anyhow::Result<Acceptor> {
        let identity = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Identity::read(certificate, key)?,
            (None, Some(key)) => Identity::kept(key)?,
            (_, None) => usual(kept())?,
        };
        let secret = known.secret_file.as_deref().map(Secret::read).transpose()?;
        Ok(Acceptor::new(&identity, secret))
    }
}

/// The identity whose key is in this file, or, where it cannot be kept, one that ends with the
/// process.
fn usual(file: Option<PathBuf>) -> anyhow::Result<Identity> {
    let cause = match file.as_deref().map(Identity::kept) {
        Some(Ok(identity)) => return Ok(identity),
        Some(Err(error)) => error.to_string(),
        None => "there is no home".into(),
    };
    output::warning(&format!(
        "this switch has another key each time it starts ({cause}): jobs that run when it is started again end. Name a file for \
         its key (--tls-key), or give all the same secret (--secret-file)"
    ));
    Ok(Identity::of_process()?)
}

/// The folder where a switch keeps its key: so it is the same when it is started again, and its
/// jobs go on.
fn kept() -> Option<PathBuf> {
    let folder = |name: &str| env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    // systemd may give several folders.
    let of_unit = env::var("STATE_DIRECTORY").ok();
    let of_unit =
        of_unit.and_then(|all| all.split(':').next().map(PathBuf::from)).filter(|one| one.is_absolute());
    let of_user = || folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")));
    of_unit.or_else(|| Some(of_user()?.join(Path::new("fanin")))).map(|folder| folder.join(KEY))
}

//! The address of a switch, as users write it.

use crate::error::SessionError;

/// The port where none is given.
const PORT_DEFAULT: u16 = 4800;

/// A switch as "host:port", as every part of fanin understands what names one.
///
/// # Errors
/// [`SessionError::Address`] for what is none.
pub fn switch_address(switch: &str) -> Result<String, SessionError> {
    with_port(switch).map(|(switch, _)| switch)
}

/// The switch as "host:port": a bare host gets the default port, a bare port is one of this
/// machine, and a bare IPv6 address gets brackets. Blanks around it do not count.
pub(crate) fn with_port(switch: &str) -> Result<(String, u16), SessionError> {
    let switch = switch.trim();
    let wrong = |cause: &str| SessionError::Address { switch: switch.into(), cause: cause.into() };
    if switch.contains(',') {
        return Err(wrong("several addresses, and a job has one switch"));
    }
    if !switch.is_empty() && switch.bytes().all(|byte| byte.is_ascii_digit()) {
        return with_port(&format!("127.0.0.1:{switch}"));
    }
    if switch.is_empty() || switch.contains(|c: char| c.is_whitespace() || c == '/') {
        return Err(wrong("not a host name"));
    }
    if let Ok(ip) = switch.parse::<std::net::Ipv6Addr>() {
        return Ok((format!("[{ip}]:{PORT_DEFAULT}"), PORT_DEFAULT));
    }
    let port = match switch.rsplit_once(':') {
        Some(("", _)) => return Err(wrong("no host before the colon")),
        Some((_, port)) if !port.ends_with(']') => port,
        _ => return Ok((format!("{switch}:{PORT_DEFAULT}"), PORT_DEFAULT)),
    };
    let port: u16 = port.parse().map_err(|_| wrong("not a port number"))?;
    if port == 0 {
        return Err(wrong("port 0 cannot be reached"));
    }
    Ok((switch.into(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_host_gets_the_default_port() {
        let port = |switch| with_port(switch).map(|(switch, _)| switch);
        assert_eq!(port("box").as_deref(), Ok("box:4800"));
        assert_eq!(port("box:1234").as_deref(), Ok("box:1234"));
        assert_eq!(port("10.0.0.9").as_deref(), Ok("10.0.0.9:4800"));
        assert_eq!(port("::1").as_deref(), Ok("[::1]:4800"));
        assert_eq!(port("[::1]").as_deref(), Ok("[::1]:4800"));
        assert_eq!(port("[::1]:9").as_deref(), Ok("[::1]:9"));
    }

    #[test]
    fn a_bare_port_is_one_of_this_machine_and_blanks_do_not_count() {
        let port = |switch| with_port(switch).map(|(switch, _)| switch);
        assert_eq!(port("4900").as_deref(), Ok("127.0.0.1:4900"));
        assert_eq!(port(" box:1234\n").as_deref(), Ok("box:1234"));
    }

    #[test]
    fn several_addresses_are_refused_as_such() {
        let Err(SessionError::Address { cause, .. }) = with_port("a:4800,b:4800") else { panic!("taken") };
        assert!(cause.contains("one switch"), "{cause}");
    }

    #[test]
    fn an_address_that_is_none_is_refused_before_anything_is_sent() {
        for switch in
            ["", ":4800", "box:", "box:port", "box:70000", "box:0", "http://box:4800", "a b", "70000", "0"]
        {
            assert!(matches!(with_port(switch), Err(SessionError::Address { .. })), "{switch}");
        }
    }
}

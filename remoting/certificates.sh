#!/bin/sh
# An authority, and a certificate with its key for a host and one for its applications, in PEM, for a
# year: `remoting/certificates.sh FOLDER HOST APPLICATION`. The authority's key (ca.key) signs
# further ones, and is needed on neither machine.
set -eu
[ $# -eq 3 ] || { echo "usage: $0 FOLDER HOST APPLICATION" >&2; exit 2; }
umask 077
mkdir -p "$1"
cd "$1"

# A new key NAME.key and a certificate NAME.pem for it, with further options of openssl.
new() {
    name=$1
    shift
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 \
        -subj "/CN=$name" -keyout "$name.key" -out "$name.pem" "$@" 2> /dev/null
}

# What it signs says that it is no authority itself, by which name it is reached, and of which side
# it is: an application cannot show a host's, nor a host an application's.
signed() {
    case $1 in
        *:*) kind=IP ;;
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
    esac
    new "$1" -CA ca.pem -CAkey ca.key -addext basicConstraints=critical,CA:false \
        -addext "subjectAltName=$kind:$1" -addext "extendedKeyUsage=$2"
}

[ -e ca.key ] || new ca
signed "$2" serverAuth
signed "$3" clientAuth

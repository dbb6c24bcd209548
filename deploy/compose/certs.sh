#!/bin/sh
# Makes the CA of a compose project, once, and certificates of all its services anew. Each lands on the service's own
# volume, as ca.pem, cert.pem and key.pem: who has one service has no other's key, and the CA's is on none of them.
set -eu
cd /certs
[ -f ca/ca.pem ] || octavo certs make-ca ca >/dev/null

issue() { # FOLDER [OPTION...]
    folder=$1
    shift
    octavo certs issue ca "$folder" --days 90 "$@" >/dev/null
    cp ca/ca.pem "$folder/ca.pem"
    mv "ca/$folder-key.pem" "$folder/key.pem"
    mv "ca/$folder.pem" "$folder/cert.pem"
}

for role in gateway scheduler kvmanager worker operator; do issue "$role"; done
issue redis --host redis --host responses
issue front $(for name in ${OCTAVO_PUBLIC_NAMES:-localhost 127.0.0.1}; do echo "--host $name"; done)
cat front/cert.pem front/key.pem >front/https.pem

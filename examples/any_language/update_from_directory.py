"""Brings replicas to a checkpoint directory with nothing but gRPC and the manager's reflection.

No package of ckpt-engine is imported and no .proto file is read: the manager says itself what its calls look like. So
the same works in every language that has gRPC reflection, and on a command line:

    grpcurl -plaintext -d '{"directory": "/checkpoints/step_7"}' \
        127.0.0.1:50051 ckpt_engine.v1.CheckpointEngineManager/UpdateFromDirectory

Needs grpcio, grpcio-reflection and protobuf. The manager must allow the directory: `manager --allow-directory ROOT`.
"""

import argparse
import sys

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE, METHOD = "ckpt_engine.v1.CheckpointEngineManager", "UpdateFromDirectory"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", help="absolute path on the manager's host")
    parser.add_argument("--manager", default="127.0.0.1:50051")
    parser.add_argument("--lineage", default="")
    arguments = parser.parse_args()
    with grpc.insecure_channel(arguments.manager) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(SERVICE).FindMethodByName(METHOD)
        request = message_factory.GetMessageClass(method.input_type)()
        event = message_factory.GetMessageClass(method.output_type)
        json_format.ParseDict({"directory": arguments.directory, "lineage": arguments.lineage}, request)
        call = channel.unary_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=event.FromString,
        )
        ok = False
        try:
            for each in call(request, timeout=900):
                said = json_format.MessageToDict(each)
                if "report" in said:
                    report = said["report"]
                    ok = report.get("ok", False)
                    new = "OUTCOME_NEW_SERVING"
                    served = [each["replica"] for each in report["replicas"] if each["outcome"] == new]
                    print(f"version {report['identity'].get('version', 0)}: {', '.join(served) or 'nobody'}")
                else:
                    print(said["progress"].get("message") or said["progress"].get("stage"), file=sys.stderr)
        except grpc.RpcError as error:
            print(f"refused: {error.details()}", file=sys.stderr)
        return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
